"""`align sample` with a real model: the command, its contexts, adapters, and stage 1 after it."""

import json
import shutil

import polars as pl
import pytest
import torch

from align.stages.model import reference
from align.stages.model.transformers_compat import quiet
from align.stages.storage.tables import TableFolder, read_table
from support.command import refusal, success
from support.mlflow_runs import open_store, the_run
from support.sampling import write_prompts

NEW = 6
QUESTIONS = [f"What is {n} and {n}?" for n in range(5)]


@pytest.fixture(scope="module")
def asked_turns(tmp_path_factory):
    turns = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return write_prompts(tmp_path_factory.mktemp("p") / "prompts.jsonl", turns, answer=[*"01234"])


def sample(world, prompts, output, *more):
    """Samples, and returns what is printed."""
    given = ("--model", world.model, "--output", output, "--max-new-tokens", NEW)
    answer = success("sample", prompts, *given, "--device", "cpu", "--no-mlflow", *more)
    return answer.out


def paid(output):
    """The number of samples that were drawn for an output, in whatever order of commands."""
    return sum(path.read_bytes().count(b"\n") for path in (output / "_align" / "answers").iterdir())


def table(folder):
    return read_table(TableFolder(folder, "samples"))[1]


@pytest.fixture(scope="module")
def whole_sample(world, asked_turns, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out"
    sample(world, asked_turns, output, "-n", 4)
    return output


def test_a_conversation_gets_messages_and_keeps_its_reference_answer(whole_sample):
    found = table(whole_sample)
    assert [one[0]["role"] for one in found["completion"].to_list()] == ["assistant"] * 20
    assert found["answer"].to_list() == [digit for digit in "01234" for _ in range(4)]
    assert found["prompt_tokens"].min() > 5
    assert found["completion_tokens"].max() == NEW
    assert paid(whole_sample) == 20


def test_other_batches_give_the_same_samples(
    world, asked_turns, whole_sample, tmp_path, monkeypatch
):
    """Two samples of each prompt are known, and the others are drawn later."""
    sample(world, asked_turns, tmp_path / "out", "-n", 2, "--tokens-per-batch", 1)
    assert paid(tmp_path / "out") == 10
    sample(world, asked_turns, tmp_path / "out", "-n", 4, "--tokens-per-batch", 90)
    assert paid(tmp_path / "out") == 20
    assert table(tmp_path / "out").equals(table(whole_sample))
    monkeypatch.setattr(reference, "load_causal_lm", lambda _: pytest.fail("weights are loaded"))
    sample(world, asked_turns, tmp_path / "out", "-n", 4)


def test_a_prompt_is_rendered_as_stage_1_renders_it(world, asked_turns, whole_sample, here):
    asked = map(json.loads, asked_turns.read_text().splitlines())
    pairs = [{"prompt": one["prompt"], "chosen": "yes", "rejected": "no"} for one in asked]
    (here / "pairs.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in pairs))
    given = ("--model", world.model, "--output", "cache", "--kl-pairs", 0, "--no-mlflow")
    success("precompute-ref", "pairs.jsonl", *given)
    lengths = sorted(map(len, pl.read_parquet("cache/data/*.parquet")["prompt_ids"].to_list()))
    assert lengths == sorted(table(whole_sample)["prompt_tokens"].to_list()[::4])


def test_a_prompt_longer_than_the_context_is_left_out(world, here):
    mixed = write_prompts(here / "p.jsonl", ["What is it?", "word " * 3000])
    sample(world, mixed, here / "out", "-n", 1)
    manifest, found = read_table(TableFolder(here / "out", "samples"))
    assert manifest.counts["prompts_too_long"] == 1
    assert found["prompt"].to_list() == ["What is it?"]
    # A context of 2,048 has room for the short prompt, and not for it and so long a sample.
    given = ("--model", world.model, "--output", here / "none", "--no-mlflow")
    long = ("--max-new-tokens", 2047)
    refusal(3, "sample", mixed, *given, *long, names=("--max-new-tokens",))
    assert not (here / "none").exists()


def test_text_is_asked_as_it_is_and_said_to_be_or_as_a_conversation(world, whole_sample, tmp_path):
    plain = write_prompts(tmp_path / "p.jsonl", QUESTIONS, answer=[*"01234"])
    assert "data.wrap=chat" in sample(world, plain, tmp_path / "plain", "-n", 1)
    assert table(tmp_path / "plain")["prompt"].to_list() == QUESTIONS
    wrapped = ("--set", "data.wrap=chat")
    assert "data.wrap" not in sample(world, plain, tmp_path / "wrapped", "-n", 4, *wrapped)
    assert table(tmp_path / "wrapped").equals(table(whole_sample))
    written = write_prompts(tmp_path / "w.jsonl", [f"Human: {text}" for text in QUESTIONS])
    given = ("--model", world.model, "--output", tmp_path / "o", "--no-mlflow", *wrapped)
    refusal(3, "sample", written, *given, names=("5 schema",))


def test_an_adapter_is_another_model(world, asked_turns, whole_sample, tmp_path):
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - slow to import
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    settings = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(world.model)
        get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    shared = ("--set", f"sample.answers={whole_sample / '_align' / 'answers'}")
    before, output = paid(whole_sample), tmp_path / "adapted"
    sample(world, asked_turns, output, "-n", 4, "--adapter", tmp_path / "adapter", *shared)
    assert paid(whole_sample) == before + 20
    ours, adapted = (read_table(TableFolder(each, "samples")) for each in (whole_sample, output))
    assert ours[0].made_from["model"] != adapted[0].made_from["model"]
    assert not ours[1]["completion"].equals(adapted[1]["completion"])


def test_a_conversation_needs_a_chat_template_and_a_text_does_not(world, asked_turns, here):
    shutil.copytree(world.model, "plain")
    (here / "plain" / "chat_template.jinja").unlink()
    texts = write_prompts(here / "p.jsonl", QUESTIONS[:1])
    given = ("--model", "plain", "-n", 1, "--max-new-tokens", 2, "--no-mlflow")
    success("sample", texts, *given, "--output", "texts")
    named = ("plain", "tokens.chat_template")
    refusal(2, "sample", asked_turns, *given, "--output", "turns", names=named)


def test_a_run_is_recorded_with_the_root_of_its_table(
    world, asked_turns, tmp_path, own_uri, no_mlflow_settings
):
    given = ("--model", world.model, "--output", tmp_path / "out", "-n", 1, "--max-new-tokens", 2)
    success("sample", asked_turns, *given, "--set", f"tracking.uri={own_uri}")
    run = the_run(open_store(own_uri), "align")
    root = read_table(TableFolder(tmp_path / "out", "samples"))[0].root
    assert run.data.tags["align.samples_root"] == root
    assert (run.data.metrics["samples/new"], run.data.metrics["table/samples"]) == (5, 5)
