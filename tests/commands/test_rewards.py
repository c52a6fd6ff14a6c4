"""A reward model scores data (`align score`) and judges samples, the same way and once."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align.pipeline.tables.judge import judge
from align.schemas.config import Config, RewardOptions, TrackingOptions
from align.schemas.round_options import JudgeOptions
from align.stages.storage.tables import TableFolder, read_table
from align.stages.tracking.progress import Progress
from support.command import success
from support.sample_tables import sample_table
from support.stage_one import contents

pytestmark = pytest.mark.numeric

TEXTS = {"Say yes. ": ["Yes.", "No.", "Yes.", " "], "And now? ": ["Well.", "Sure."]}


@pytest.fixture(scope="module")
def own_score(reward_model):
    """What the model itself gives to a text as a person would tokenize it, with one EOS."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_model)

    def score(prompt, completion):
        if isinstance(prompt, str):
            ids = [*tokenizer(prompt + completion).input_ids, tokenizer.eos_token_id]
        else:
            ids = tokenizer.apply_chat_template([*prompt, *completion], return_dict=False)
            ids = ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)]
        with torch.no_grad():
            return model(torch.tensor([ids])).logits.item()

    return score


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def score(data, folder, *more):
    return success("score", data, "--output", folder, "--no-mlflow", *more)


@pytest.mark.parametrize("shape", ["scored", "paired_chat"])
def test_scores_are_those_of_the_model_itself(world, reward_model, own_score, tmp_path, shape):
    data, options = getattr(world.data, shape), ("--reward-model", reward_model)
    first = score(data, tmp_path / "out", *options)
    before = contents(tmp_path / "out" / "cache")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == pq.read_metadata(data).num_rows
    for row in rows[:5]:
        for completion, own in zip(row["completions"], row["scores"], strict=True):
            assert own == pytest.approx(own_score(row["prompt"], completion), abs=1e-4)
    assert score(data, tmp_path / "out", *options).out == first.out
    assert contents(tmp_path / "out" / "cache") == before


def test_candidates_need_no_scores(reward_model, tmp_path):
    completions = [[" Yes.", " No.", " Well."], [" Yes."]]
    table = pa.table({"prompt": ["Say yes.", None], "completions": completions})
    pq.write_table(table, tmp_path / "rows.parquet")
    options = ("--reward-model", reward_model, "--max-bad-frac", 0.5)
    score(tmp_path / "rows.parquet", tmp_path / "out", *options)
    (row,) = rows_of(tmp_path / "out")
    assert len(row["scores"]) == 3


def test_a_score_is_of_the_whole_completion_whatever_of_it_is_learned(
    reward_model, own_score, tmp_path
):
    """One ends with a message that is not learned, and one with the user's."""
    first = {"role": "assistant", "content": "Yes."}
    asked = {"role": "user", "content": "Sure?"}
    last = {"role": "assistant", "content": "No.", "loss": False}
    row = {"prompt": [asked], "completions": [[first, asked, last], [first, asked]]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    score(tmp_path / "rows.jsonl", tmp_path / "out", "--reward-model", reward_model)
    (found,) = rows_of(tmp_path / "out")
    for completion, own in zip(row["completions"], found["scores"], strict=True):
        assert own == pytest.approx(own_score(row["prompt"], completion), abs=1e-4)


def test_scored_data_is_data_to_learn_from(world, reward_model, here):
    score(world.data.paired, "out", "--reward-model", reward_model)
    made = ("--model", world.model, "--output", "cache", "--token-logps", "--no-mlflow")
    success("precompute-ref", "out/rows.jsonl", *made)
    run = ("--cache", "cache", "--output", "run", "--max-steps", 1, "--no-mlflow")
    success("train", "--method", "grpo", *run)


def judged(folder, samples, model):
    """How many samples were scored now, how many before, and the rows."""
    config = Config(
        judge=JudgeOptions(by="reward", output=str(folder)),
        rewards=RewardOptions(model=str(model)),
        tracking=TrackingOptions(mlflow=False),
    )
    tally = judge(config, samples, progress=Progress()).counts
    rows = read_table(TableFolder.at(str(folder), "judged"))[1].rows(named=True)
    return (tally.new, tally.known), rows


@pytest.mark.parametrize("chat", [False, True])
def test_samples_are_judged_by_the_models_scores(reward_model, own_score, tmp_path, chat):
    samples = sample_table(tmp_path / "s", TEXTS, chat=chat)
    _, rows = judged(tmp_path / "out", samples, reward_model)
    *scored, blank = sorted(rows, key=lambda row: row["number"] == 3)
    assert blank["score"] is None
    for row in scored:
        own = own_score(row["prompt"], row["completion"])
        assert row["score"] == pytest.approx(own, abs=1e-4)
    assert rows[0]["score"] == rows[2]["score"] != rows[1]["score"]


def test_grown_samples_have_only_new_ones_scored(reward_model, tmp_path):
    first = sample_table(tmp_path / "s", TEXTS)
    # The same answer to another prompt, in another order.
    grown = {prompt: [*texts, "Yes.", "More."] for prompt, texts in reversed(TEXTS.items())}
    second = sample_table(tmp_path / "t", grown)
    assert judged(tmp_path / "out", first, reward_model)[0] == (4, 0)
    counts, rows = judged(tmp_path / "out", second, reward_model)
    assert counts == (3, 4)
    assert judged(tmp_path / "fresh", second, reward_model)[1] == rows


def test_samples_that_are_all_blank_have_no_score(reward_model, tmp_path):
    samples = sample_table(tmp_path / "s", {"Say yes.": ["", " \n"]})
    counts, rows = judged(tmp_path / "out", samples, reward_model)
    assert (counts, [row["score"] for row in rows]) == ((0, 0), [None, None])
