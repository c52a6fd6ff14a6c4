"""Names of other trainers' options: answered with ours, never taken for one of them."""

import re
from dataclasses import fields

import pytest

from align.pipeline.options.declared import METHOD, declared
from align.pipeline.options.other_names import (
    TABLE,
    answer_of,
    line_of,
    markdown_names,
    meaning_of,
)
from align.pipeline.options.settings import load_settings
from align.schemas.errors import UsageError
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS
from support.command import align, refusal
from support.pages import page
from support.seed_options import TRAINERS, section_of

pytestmark = pytest.mark.usefixtures("here")

NAMES = {name: their for their in TABLE for name in their.names}
MEANT = {
    "learning_rate": "train.lr",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "micro_batch_size": "train.tokens_per_batch",
    "pref_beta": "method.beta",
    "loss_type": "train.method",
    "kto_chosen_weight": "method.desirable_weight",
    "cutoff_len": "tokens.max_length",
    "max_prompt_length": "tokens.max_prompt_length",
    "lora_r": "lora.rank",
    "output_dir": "train.output",
    "bf16": "train.dtype",
    "kl_coef": "method.kl",
    "zero_stage": "train.deepspeed",
    "adam_betas": "train.beta1 and train.beta2",
    "adam.lr": "train.lr",
    "rl.beta": "method.beta",  # a name inside a section of theirs
    # Our own, in no section or in another one.
    "weight_decay": "train.weight_decay",
    "train.max_length": "tokens.max_length",
}


def refused_flag(command, flag):
    """What is said of a flag, without the frame around it."""
    answer = align(command, flag, "1")
    assert answer.code == 2, answer
    return " ".join(answer.err.replace("│", " ").split())


def test_a_name_of_another_tool_is_answered_with_the_setting_that_is_meant():
    for name, setting in MEANT.items():
        told = f"{name} is {setting} here"
        with pytest.raises(UsageError) as refused:
            load_settings({}, [f"{name}=1"], file=None)
        assert f"--set: {told}" in str(refused.value), name
        for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
            assert f"{flag} is {setting} here" in refused_flag("config", flag), name
    section = "train.gradient_accumulation_steps=8"
    assert "is train.batch_size here" in refusal(2, "config", "--set", section)
    assert "No such option" in refused_flag("train", "--nothing-of-this-kind")


def test_a_flag_is_given_to_the_command_that_takes_it():
    for command, flag, way in (
        ("train", "--learning_rate", "pass --lr."),
        ("train", "--adam_beta2", "pass --set train.beta2=VALUE."),
        ("train", "--cutoff-len", "pass --max-length to `align precompute-ref`."),
        ("precompute-ref", "--max_length", "pass --max-length."),
        ("precompute-ref", "--learning-rate", "pass --lr to `align train`."),
        ("inspect", "--merge-lora", "pass --merge to `align train`."),
    ):
        assert way in refused_flag(command, flag), flag


def test_a_config_file_of_another_tool_is_answered_as_a_whole(here):
    names = [name for name in NAMES if "." not in name]
    (here / "theirs.yaml").write_text("".join(f"{name}: 1\n" for name in names))
    said = refusal(2, "config", "--config", "theirs.yaml").splitlines()
    assert [line.split()[1] for line in said] == names


def test_what_is_a_setting_here_is_not_taken_for_a_name_of_another_tool():
    options = {
        f"method.{one}" for method in METHODS.values() for one in method.options.__annotations__
    }
    mixed = {"method.dpo.beta", "method.beta", "method.wpo", "method.log_eps_p"}
    settings = {name for name in declared() if name != METHOD} | options | mixed
    assert not {name: said for name in settings if (said := meaning_of(name))}
    assert meaning_of("method.kl_coef")


def test_each_name_has_one_line_and_each_setting_in_it_exists():
    assert len(NAMES) == sum(len(their.names) for their in TABLE)
    known = {*declared()} | {
        f"method.{one}" for method in METHODS.values() for one in method.options.__annotations__
    }
    known |= {f"method.{one.name}" for one in fields(Modifiers)}
    assert not {one for their in TABLE for one in their.settings} - known
    sections = "|".join({one.partition(".")[0] for one in known})
    in_notes = {
        one for their in TABLE for one in re.findall(rf"\b(?:{sections})\.[a-z_]+", their.note)
    }
    assert not in_notes - known
    assert [name for name, their in NAMES.items() if not (their.settings or their.note)] == []


def test_the_page_shows_the_table():
    table = markdown_names()
    assert align("config", "--other-tools").out == table
    assert table in page("docs/moving-from-other-tools.md").read_text(encoding="utf-8")


def test_every_option_of_the_seed_trainers_is_a_setting_or_has_its_reason():
    for trainer in TRAINERS:
        assert len(set(trainer.options)) == len(trainer.options)
        silent = [option for option in trainer.options if answer_of(option) == ("", "")]
        assert not silent, trainer.heading
        lines = [line for option in trainer.options if (line := line_of(option))]
        assert {line.names[0] for line in lines if trainer.name not in line.tools} == set()


def test_the_page_of_the_seed_trainers_has_every_option():
    shown = page("docs/options-of-other-trainers.md").read_text(encoding="utf-8")
    for trainer in TRAINERS:
        assert section_of(trainer) in shown, trainer.heading
