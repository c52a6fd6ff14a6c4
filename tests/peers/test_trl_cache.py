"""TRL's trainers with a cache as their reference, beside the same trainers with a live one."""

import re

import pytest
from datasets import Dataset, Features, Value
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTTrainer, unpair_preference_dataset

import align
from align.stages.demo.preferences import draw_preferences, paired
from support.command import success
from support.training_world import ROWS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
STEPS = 5
PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
CACHED = {"precompute_ref_log_probs": True}


@pytest.fixture
def pairs():
    drawn = paired(list(draw_preferences(ROWS, seed=1)))
    columns = {name: drawn[name].to_pylist() for name in ("prompt", "chosen", "rejected")}
    return Dataset.from_dict(columns, features=Features(dict.fromkeys(columns, Value("string"))))


@pytest.fixture
def given(training_world, tmp_path):
    """The arguments of a trainer; its model counts its forward passes."""

    def make(config, data, **settings):
        model = AutoModelForCausalLM.from_pretrained(training_world.model, dtype="float32")
        model.passes = 0
        model.register_forward_pre_hook(
            lambda model, _: vars(model).update(passes=model.passes + 1)
        )
        return {
            "model": model,
            "args": config(output_dir=str(tmp_path), **PLAIN | settings),
            "train_dataset": data,
            "processing_class": AutoTokenizer.from_pretrained(training_world.model),
        }

    return make


def logged(trainer, name):
    trainer.train()
    return [line[name] for line in trainer.state.log_history if name in line]


def test_the_dpo_trainer_learns_the_same_without_a_reference(training_world, pairs, given):
    reference = align.trl.CachedReference(training_world.pairs)
    cached = reference.trainer(DPOTrainer, **given(DPOConfig, pairs, **CACHED), eval_dataset=pairs)
    assert (cached.ref_model, cached.model.passes) == (None, 0)
    live = DPOTrainer(**given(DPOConfig, pairs), eval_dataset=pairs)
    assert live.ref_model is not None
    losses = logged(cached, "loss")
    assert len({*losses}) == len(losses) == STEPS
    assert losses == pytest.approx(logged(live, "loss"), abs=1e-5)
    assert cached.model.passes == STEPS
    assert cached.evaluate()["eval_loss"] == pytest.approx(live.evaluate()["eval_loss"], abs=1e-5)


def test_the_kto_trainer_gets_the_kl_completions_of_the_cache(training_world, pairs, given, caplog):
    reference = align.trl.CachedReference(training_world.pairs)
    data = unpair_preference_dataset(pairs).shuffle(seed=0)
    trainer = reference.trainer(KTOTrainer, **given(KTOConfig, data, **CACHED))
    assert [record.name for record in caplog.records].count("align") == 1
    assert (trainer.ref_model, trainer.model.passes) == (None, 0)
    partners = {
        (*row["prompt_ids"], 0, *row[f"{side}_ids"]): row[f"KL_{side}_ids"]
        for row in align.load_cache(training_world.pairs).collect().iter_rows(named=True)
        for side in ("chosen", "rejected")
    }
    rows = trainer.train_dataset
    assert len(rows) == 2 * ROWS
    for row in rows:
        assert row["KL_completion_ids"] == partners[*row["prompt_ids"], 0, *row["completion_ids"]]
    some = [rows[number] for number in range(8)]
    found = trainer.compute_ref_log_probs(trainer.model, trainer.data_collator(some))
    for name, logps in zip(("ref_logps", "ref_KL_logps"), found, strict=True):
        assert [row[name] for row in some] == pytest.approx(logps.tolist(), abs=1e-4)
    passes = trainer.model.passes
    assert logged(trainer, "loss")[0] == pytest.approx(0.5, abs=1e-5)
    assert trainer.model.passes == passes + 2 * STEPS


def test_a_row_that_is_not_cached_is_refused(training_world, pairs, given):
    changed = pairs.to_list()
    changed[7]["rejected"] += " Never mind."
    reference = align.trl.CachedReference(training_world.pairs)
    settings = given(DPOConfig, Dataset.from_list(changed), **CACHED)
    with pytest.raises(align.AlignError, match=r"Row 7 .*\btrain\b"):
        reference.trainer(DPOTrainer, **settings)


def test_another_stop_token_is_refused_with_both_shown(training_world, pairs, given):
    settings = given(KTOConfig, unpair_preference_dataset(pairs), **CACHED)
    tokenizer = settings["processing_class"]
    stop, tokenizer.eos_token = tokenizer.eos_token_id, tokenizer.pad_token
    reference = align.trl.CachedReference(training_world.labels, training_world.pairs)
    with pytest.raises(align.AlignError, match=r"Row 0 .*\btrain\b") as refused:
        reference.trainer(KTOTrainer, **settings)
    shown = re.findall(r"\[(\d+)\]", str(refused.value))
    assert shown == [str(tokenizer.eos_token_id), str(stop)]


def test_a_kl_completion_that_would_be_cut_is_refused(training_world, pairs, given):
    reference = align.trl.CachedReference(training_world.pairs)
    cache = align.load_cache(training_world.pairs).collect()
    longest = max(
        len(row["prompt_ids"]) + len(row[f"{side}_ids"])
        for row in cache.iter_rows(named=True)
        for side in ("chosen", "rejected")
    )
    data = unpair_preference_dataset(pairs)
    settings = given(KTOConfig, data, max_length=longest, **CACHED)
    with pytest.raises(align.AlignError, match="max_length"):
        reference.trainer(KTOTrainer, **settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("precompute_ref_log_probs", {}),
        ("ld_alpha", {"ld_alpha": 0.5, **CACHED}),
    ],
)
def test_settings_that_need_a_live_reference_are_refused(
    training_world, pairs, given, name, settings
):
    reference = align.trl.CachedReference(training_world.pairs)
    with pytest.raises(align.AlignError, match=name):
        reference.trainer(DPOTrainer, **given(DPOConfig, pairs, **settings))


def test_a_trainer_without_a_reference_is_refused(training_world, pairs, given):
    reference = align.trl.CachedReference(training_world.pairs)
    with pytest.raises(align.AlignError, match="SFTTrainer"):
        reference.trainer(SFTTrainer, **given(DPOConfig, pairs, **CACHED))


def test_a_second_reference_is_refused(training_world, pairs, given):
    reference = align.trl.CachedReference(training_world.pairs)
    settings = given(DPOConfig, pairs, **CACHED)
    with pytest.raises(align.AlignError, match="ref_model"):
        reference.trainer(DPOTrainer, ref_model=settings["model"], **settings)


def test_log_probs_of_trl_become_a_cache(training_world, pairs, given, tmp_path):
    trainer = KTOTrainer(**given(KTOConfig, unpair_preference_dataset(pairs), **CACHED))
    trainer.train_dataset.save_to_disk(tmp_path / "trl")
    table = DPOTrainer(**given(DPOConfig, pairs, **CACHED)).train_dataset
    table.to_parquet(tmp_path / "trl.parquet")
    for name in ("trl", "trl.parquet"):
        words = (training_world.folder / "pairs.parquet", "--logps", tmp_path / name)
        made = ("--model", training_world.model, "--output", tmp_path / f"from-{name}")
        said = success("import-ref", *words, *made, "--kl-pairs", 0, "--no-mlflow").out
        assert f"reused {2 * ROWS} of {2 * ROWS}" in said
