"""A reward model judges samples as `align score` scores them, and scores nothing twice."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align.stages.storage.tables import TableFolder, read_table
from support.command import align
from support.sample_tables import sample_table

pytestmark = pytest.mark.numeric

TEXTS = {"Say yes. ": ["Yes.", "No.", "Yes.", " "], "And now? ": ["Well.", "Sure."]}


def judged(folder, samples, model, *more):
    options = ("--by", "reward", "--reward-model", model, "--output", folder, "--no-mlflow")
    answer = align("judge", samples, *options, *more)
    assert answer.code == 0, answer
    return answer, read_table(TableFolder.at(str(folder), "judged"))[1].rows(named=True)


@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_those_of_the_model_itself(reward_model, tmp_path, chat):
    samples = sample_table(tmp_path / "s", TEXTS, chat=chat)
    _, rows = judged(tmp_path / "out", samples, reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    for row in rows:
        if row["number"] == 3:
            assert row["score"] is None  # it is blank
            continue
        with torch.no_grad():
            wanted = model(torch.tensor([ids_of(tokenizer, row)])).logits.item()
        assert row["score"] == pytest.approx(wanted, abs=1e-4)
    assert rows[0]["score"] == rows[2]["score"] != rows[1]["score"]


def ids_of(tokenizer, row):
    """The text as a person would tokenize it, with one EOS at its end."""
    if isinstance(row["prompt"], str):
        return [*tokenizer(row["prompt"] + row["completion"]).input_ids, tokenizer.eos_token_id]
    messages = [*row["prompt"], *row["completion"]]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    return ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)]


def test_grown_samples_have_only_new_ones_scored(reward_model, tmp_path):
    first = sample_table(tmp_path / "s", TEXTS)
    grown = {prompt: [*texts, "More."] for prompt, texts in reversed(TEXTS.items())}
    second = sample_table(tmp_path / "t", grown)
    answer, _ = judged(tmp_path / "out", first, reward_model)
    assert "4 judgments made, 0 known before" in answer.out
    answer, rows = judged(tmp_path / "out", second, reward_model)
    assert "2 judgments made, 4 known before" in answer.out
    answer, _ = judged(tmp_path / "out", second, reward_model)
    assert "0 judgments made" in answer.out
    _, fresh = judged(tmp_path / "fresh", second, reward_model)
    assert rows == fresh
    kept = ("--set", f"judge.answers={tmp_path}/out/_align/answers")
    answer, _ = judged(tmp_path / "other", first, reward_model, *kept)
    assert "0 judgments made, 4 known before" in answer.out
