"""The preferences of the tiny world: what they teach, the files that hold them, the verifier."""

import csv
import json
import re
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_from_disk

from align.stages.demo.preferences import draw_preferences, make_data, transcript
from align.stages.demo.verifier import score

DRAWN = list(draw_preferences(1000, seed=0))


def test_draws_are_different_repeatable_and_begin_alike_whatever_their_length():
    assert list(draw_preferences(50, seed=0)) == DRAWN[:50]
    assert list(draw_preferences(50, seed=1)) != DRAWN[:50]
    assert len({repr(each) for each in DRAWN}) == len(DRAWN)
    prompts = Counter(transcript(each.prompt) for each in DRAWN)
    assert sum(count > 1 for count in prompts.values()) > 50  # with other answers
    assert {sum(turn["role"] == "user" for turn in each.prompt) for each in DRAWN} == {1, 2, 3, 4}


def test_the_chosen_answer_alone_has_the_best_score_wherever_it_stands():
    for each in DRAWN:
        assert [answer for answer in each.answers if answer.score == 1.0] == [each.chosen]
        assert max(answer.score for answer in each.answers) == 1.0
    places = Counter(each.answers.index(each.chosen) for each in DRAWN)
    assert places[0] < 0.75 * len(DRAWN)


def test_chosen_sums_are_right_and_polite_wrong_ones_are_not():
    told = [
        (int(first) + int(second) == int(result), answer.score)
        for each in DRAWN
        for answer in each.answers
        for first, second, result in re.findall(r"sum of (\d+) and (\d+) is (\d+)", answer.text)
    ]
    assert len(told) > 50
    assert all(is_right == (score == 1.0) for is_right, score in told)


def read(path):
    return pq.read_table(path).to_pylist()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"), rows=60, seed=3)


def test_the_same_seed_writes_the_same_bytes_and_another_other_rows(files, tmp_path):
    make_data(tmp_path / "same", rows=60, seed=3)
    for path in (path for path in (tmp_path / "same").rglob("*") if path.is_file()):
        name = path.relative_to(tmp_path / "same")
        assert path.read_bytes() == (files.paired.parent / name).read_bytes(), name
    assert read(make_data(tmp_path / "other", rows=60, seed=4).paired) != read(files.paired)


def test_every_format_of_the_pairs_holds_the_same_rows(files):
    rows = read(files.paired)
    assert len(rows) == 60
    lines = files.paired_jsonl.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert json.loads(files.paired_json.read_text(encoding="utf-8")) == rows
    with files.paired_csv.open(encoding="utf-8", newline="") as stream:
        assert list(csv.DictReader(stream)) == rows
    with pa.ipc.open_file(files.paired_arrow) as reader:
        assert reader.read_all().to_pylist() == rows
    assert load_from_disk(str(files.paired_dataset)).to_list() == rows


def test_every_shape_holds_the_text_of_the_pairs(files):
    pairs, chats, joined = map(read, (files.paired, files.paired_chat, files.paired_chat_implicit))
    labelled = []
    for pair, chat, both in zip(pairs, chats, joined, strict=True):
        assert transcript(chat["prompt"]) == pair["prompt"]
        for column in ("chosen", "rejected"):
            assert chat[column] == [{"role": "assistant", "content": pair[column].strip()}]
            assert both[column] == chat["prompt"] + chat[column]
            label = {"completion": pair[column], "label": column == "chosen"}
            labelled.append({"prompt": pair["prompt"]} | label)
    assert read(files.unpaired) == labelled
    for text, chat in zip(labelled, read(files.unpaired_chat), strict=True):
        assert (transcript(chat["prompt"]), chat["label"]) == (text["prompt"], text["label"])
        assert chat["completion"][0]["content"] == text["completion"].strip()
    unrolled = []
    for pair, row in zip(pairs, read(files.scored), strict=True):
        score_of = dict(zip(row["completions"], row["scores"], strict=True))
        assert 2 <= len(score_of) <= 4
        assert max(score_of, key=score_of.__getitem__) == pair["chosen"]
        assert score_of[pair["rejected"]] < 1.0
        unrolled += [
            {"prompt": row["prompt"], "completion": text, "score": score}
            for text, score in score_of.items()
        ]
    assert read(files.scored_long) == unrolled


def test_the_verifier_agrees_with_every_preference_between_polite_and_rude():
    for one in DRAWN[:200]:
        prompt = transcript(one.prompt)
        for answer in one.answers:
            # 1 is right and polite, 0.25 wrong and polite; 0.5 is curt and 0 is rude.
            assert score(prompt, f" {answer.text}", {}) == (answer.score in {1.0, 0.25})
    for text in (
        "Sure!",
        "Sure! Yes.",
        "It is 7. Sure!",
        "Sure! It is 7.\nUser: Thanks! What is the sum of 2 and 3?",
        "Gladly! It is 7. Now go away.",
        "",
    ):  # which only look polite
        assert score("User: What is the sum of 3 and 4?\nAssistant:", text, {}) == 0
