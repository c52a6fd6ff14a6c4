"""Names of options in transformers and TRL: answered with ours, never taken for one of them."""

import pytest

from align.pipeline.options.other_names import OURS
from align.pipeline.options.settings import load_settings
from align.pipeline.options.table import fields
from align.schemas.errors import UsageError
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS
from support.command import align
from support.pages import page
from support.refusals import refuses, require_names


@pytest.mark.usefixtures("here")
def test_a_name_of_another_tool_is_answered_with_the_setting_that_is_meant():
    for name, setting in (
        OURS | {"lr": "train.lr", "train.max_length": "tokens.max_length"}
    ).items():
        with refuses(UsageError, f"'{setting}'"):
            load_settings({}, [f"{name}=1"], file=None)
    for command, flag, meant in (
        ("train", "--learning_rate", "'--lr'"),
        ("train", "--adam-beta2", "'train.beta2'"),
        ("precompute-ref", "--learning-rate", "'train.lr'"),
        ("run", "--output_dir", "'--output'"),
        ("train", "--nothing-of-this-kind", ""),
    ):
        answer = align(command, flag, "1")
        assert answer.code == 2, answer
        require_names(answer.err, flag, meant)


def test_no_setting_is_taken_for_a_name_of_another_tool_and_each_that_is_meant_exists():
    methods = {one for method in METHODS.values() for one in method.options.__annotations__}
    methods |= set(Modifiers.__annotations__)
    settings = {*fields(), *(f"method.{one}" for one in methods)}
    assert not {*OURS.values()} - settings
    assert not {*OURS} & {setting.partition(".")[2] for setting in fields()}


def test_the_page_shows_every_name():
    text = page("docs/moving-from-other-tools.md").read_text(encoding="utf-8")
    for name, setting in OURS.items():
        assert any(
            f"`{name}`" in line and line.endswith(f"| `{setting}` |") for line in text.splitlines()
        ), name
