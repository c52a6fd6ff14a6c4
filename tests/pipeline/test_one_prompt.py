"""One prompt whose ids depend on how its completion begins: the boundary falls inside a token."""

from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from align.schemas.config import (
    CacheOptions,
    Config,
    DataOptions,
    ModelOptions,
    TokenOptions,
    TrackingOptions,
)
from align.schemas.errors import FingerprintError
from align.schemas.rows import Role
from align.stages.feed.cache_index import ShardColumns
from align.stages.feed.conversions import Reading
from align.stages.feed.train_source import open_source
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.verify_cache import check_shard
from support.read_rows import write_rows
from support.stage_one import run

PROMPTS = 40
# The blank before a word is a part of the word's token; that before a digit is a token of its own.
ANSWERS = ("{0}", "about {0}", "{1}", "hello {0} or {1}")


def prompt_of(number):
    return f"Q: What is {number} and {number + 3}? Answer: "


def answers_of(number):
    return [answer.format(2 * number + 3, number) for answer in ANSWERS]


TEXTS = [
    (prompt_of(number), answer, place / 10)
    for number in range(PROMPTS)
    for place, answer in enumerate(answers_of(number))
]
SCORES = [place / 10 for place in range(len(ANSWERS))]
ROWS = {
    "long": [{"prompt": p, "completion": c, "score": s} for p, c, s in TEXTS],
    "list": [
        {"prompt": prompt_of(number), "completions": answers_of(number), "scores": SCORES}
        for number in range(PROMPTS)
    ],
    "unpaired": [{"prompt": p, "completion": c, "label": s > 0.1} for p, c, s in TEXTS],
}


@pytest.fixture(scope="module")
def digits_alone(tokenizer_folder, tmp_path_factory):
    """The tiny tokenizer, but each digit is a token of its own."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), words]
    )
    folder = tmp_path_factory.mktemp("digits")
    tokenizer.save_pretrained(folder)
    return str(folder)


def make(folder, model, rows):
    """The cache of these rows and its manifest."""
    data, output = folder / "rows.jsonl", str(folder / "cache")
    write_rows(data, rows)
    config = Config(
        model=ModelOptions(path=model),
        data=DataOptions(files=[str(data)]),
        tokens=TokenOptions(max_length=256),
        cache=CacheOptions(output=output, rows_per_shard=64, kl_pairs=2, reuse_known=False),
        tracking=TrackingOptions(mlflow=False),
    )
    return CacheFolder(Path(output)), run(config).manifest


@pytest.fixture(scope="module")
def caches(digits_alone, tmp_path_factory):
    """A cache and its manifest of each shape of the rows."""
    return {
        shape: make(tmp_path_factory.mktemp(shape), digits_alone, rows)
        for shape, rows in ROWS.items()
    }


@pytest.fixture(scope="module")
def decoded(digits_alone):
    tokenizer = AutoTokenizer.from_pretrained(digits_alone)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def rows_of(cache):
    folder, manifest = cache
    return [row for s in manifest.shards for row in pq.read_table(folder.data / s.file).to_pylist()]


def question(row, decoded):
    """The prompt a stored row belongs to, whatever its ids are."""
    return decoded(row["prompt_ids"]).partition(" Answer")[0]


def test_candidates_of_one_prompt_are_one_group_in_long_form_and_as_lists(caches, decoded):
    notes = caches["unpaired"][1].notes
    assert notes["rows_with_a_token_across_the_boundary"] == 2 * PROMPTS
    assert len({tuple(row["prompt_ids"]) for row in rows_of(caches["unpaired"])}) == 2 * PROMPTS
    expected = defaultdict(Counter)
    for prompt, answer, score in TEXTS:
        expected[prompt + answer][score] += 1
    found = {}
    for shape in ("long", "list"):
        rows = rows_of(caches[shape])
        found[shape] = {row["prompt_key"]: (row["prompt_ids"], own_branches(row)) for row in rows}
        assert len(found[shape]) == len(rows) == PROMPTS
        for prompt, branches in found[shape].values():
            assert len(branches) == len(ANSWERS)
            for ids, score in branches:
                assert expected[decoded(prompt + ids)][score] == 1
    assert found["long"] == found["list"]


def own_branches(row):
    branches = zip(row["completion_ids"], row["role"], row["score"], strict=True)
    return sorted((ids, score) for ids, role, score in branches if role != Role.MISMATCHED)


def test_no_prompt_is_held_out_and_learned_from(caches, decoded):
    folder, manifest = caches["unpaired"]
    reading = Reading("labelled", mismatched=False, eval_fraction=0.4)
    source = open_source(folder, manifest, reading, ShardColumns(check_shard))
    questions = [question(row, decoded) for row in rows_of(caches["unpaired"])]
    sizes = [0, *(shard.rows for shard in manifest.shards)]
    assert sum(sizes) == len(questions)
    sides = []
    for table in (source.index.train, source.index.held_out):
        groups = zip(table.group_offsets[:-1], table.group_offsets[1:], strict=True)
        sides.append(
            {
                questions[sum(sizes[: group + 1]) + place]
                for group, (start, stop) in enumerate(groups)
                for place in table.places[start:stop].tolist()
            }
        )
    assert all(sides)
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("shape", ROWS)
def test_no_completion_is_paired_with_an_answer_to_its_own_prompt(caches, decoded, shape):
    answers, partners = defaultdict(set), []
    for row in rows_of(caches[shape]):
        asked = question(row, decoded)
        for ids, role in zip(row["completion_ids"], row["role"], strict=True):
            if role == Role.MISMATCHED:
                partners.append((asked, tuple(ids)))
            else:
                answers[tuple(ids)].add(asked)
    assert len(partners) == 2 * len(TEXTS)
    assert all(answers[ids] - {asked} for asked, ids in partners)


def test_a_group_grows_in_place_by_a_candidate_that_moves_its_boundary(digits_alone, tmp_path):
    words = [row for row in ROWS["long"] if not row["completion"][0].isdigit()]
    _, before = make(tmp_path, digits_alone, words)
    _, after = make(tmp_path, digits_alone, ROWS["long"])
    assert (before.rows, after.rows) == (PROMPTS, PROMPTS)
    assert after.branches == 2 * before.branches
    with pytest.raises(FingerprintError, match=f"{PROMPTS} of its .* completions are not in"):
        make(tmp_path, digits_alone, [row for row in ROWS["long"] if row["score"] != 0])
