"""One prompt whose ids depend on how its completion begins: the boundary falls inside a token."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from align.schemas.config import DataOptions, ModelOptions, TokenOptions
from align.schemas.errors import FingerprintError
from align.schemas.rows import Role
from align.stages.feed.cache_index import ShardColumns
from align.stages.feed.conversions import Reading
from align.stages.feed.train_source import open_source
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from align.stages.storage.verify_cache import check_shard
from support.stage_one import run

PROMPTS = 40
# The blank before a word is a part of the word's token; that before a digit is a token of its own.
ANSWERS = ("{0}", "about {0}", "{1}", "hello {0} or {1}")


def prompt_of(number):
    return f"Q: What is {number} and {number + 3}? Answer: "


def texts():
    for number in range(PROMPTS):
        for place, answer in enumerate(ANSWERS):
            yield prompt_of(number), answer.format(2 * number + 3, number), place / 10


ROWS = {
    "long": [{"prompt": p, "completion": c, "score": s} for p, c, s in texts()],
    "list": [
        {
            "prompt": prompt_of(number),
            "completions": [c for p, c, _ in texts() if p == prompt_of(number)],
            "scores": [place / 10 for place in range(len(ANSWERS))],
        }
        for number in range(PROMPTS)
    ],
    "unpaired": [{"prompt": p, "completion": c, "label": s > 0.1} for p, c, s in texts()],
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


@pytest.fixture
def make_one_prompt(config, digits_alone, tmp_path):
    """The cache of one shape of these rows."""

    def make(shape, rows=None, **tokens):
        path = tmp_path / f"{shape}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[shape]))
        output = str(tmp_path / shape)
        cache = replace(config.cache, output=output, kl_pairs=2, rows_per_shard=64)
        changed = replace(
            config,
            model=ModelOptions(path=digits_alone),
            data=DataOptions(files=[str(path)]),
            cache=cache,
            tokens=TokenOptions(**{"max_length": 256, **tokens}),
        )
        return CacheFolder(Path(output)), run(changed).manifest

    return make


@pytest.fixture
def decoded(digits_alone):
    tokenizer = AutoTokenizer.from_pretrained(digits_alone)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def rows_of(folder):
    shards = load_manifest(folder).shards
    return [row for s in shards for row in pq.read_table(folder.data / s.file).to_pylist()]


def question(row, decoded):
    """The prompt a stored row belongs to, whatever its ids are."""
    return decoded(row["prompt_ids"]).partition(" Answer")[0]


def test_the_boundary_of_some_answers_really_is_inside_a_token(make_one_prompt):
    folder, manifest = make_one_prompt("unpaired")
    assert manifest.notes["rows_with_a_token_across_the_boundary"] == 2 * PROMPTS
    assert len({tuple(row["prompt_ids"]) for row in rows_of(folder)}) == 2 * PROMPTS


def test_candidates_of_one_prompt_are_one_group(make_one_prompt, decoded):
    folder, _ = make_one_prompt("long")
    rows = rows_of(folder)
    assert len(rows) == PROMPTS
    expected = defaultdict(Counter)
    for prompt, answer, score in texts():
        expected[prompt + answer][score] += 1
    for row in rows:
        own = [i for i, role in enumerate(row["role"]) if role == Role.CANDIDATE]
        assert len(own) == len(ANSWERS)
        for branch in own:
            text = decoded(row["prompt_ids"] + row["completion_ids"][branch])
            assert expected[text][row["score"][branch]] == 1


def test_long_form_and_list_form_make_the_same_rows(make_one_prompt):
    found = {}
    for shape in ("long", "list"):
        folder, _ = make_one_prompt(shape)
        found[shape] = {row["prompt_key"]: branches(row) for row in rows_of(folder)}
    assert len(found["long"]) == PROMPTS
    assert found["long"] == found["list"]


def branches(row):
    """The prompt of a row and its own branches, in any order."""
    own = zip(row["completion_ids"], row["role"], row["score"], strict=True)
    scored = sorted((ids, score) for ids, role, score in own if role != Role.MISMATCHED)
    return row["prompt_ids"], row["prompt_cut"], scored


def test_no_prompt_is_held_out_and_learned_from(make_one_prompt, decoded):
    folder, manifest = make_one_prompt("unpaired")
    reading = Reading("labelled", mismatched=False, eval_fraction=0.4)
    source = open_source(folder, manifest, reading, ShardColumns(check_shard))
    questions = [question(row, decoded) for row in rows_of(folder)]
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


def test_no_completion_is_paired_with_an_answer_to_its_own_prompt(make_one_prompt, decoded):
    for shape in ROWS:
        rows = rows_of(make_one_prompt(shape)[0])
        answers = {}
        for row in rows:
            for ids, role in zip(row["completion_ids"], row["role"], strict=True):
                if role != Role.MISMATCHED:
                    answers.setdefault(tuple(ids), set()).add(question(row, decoded))
        for row in rows:
            partners = zip(row["completion_ids"], row["role"], strict=True)
            for ids in (ids for ids, role in partners if role == Role.MISMATCHED):
                assert answers[tuple(ids)] - {question(row, decoded)}


def test_a_group_grows_in_place_by_a_candidate_that_moves_its_boundary(make_one_prompt):
    words = [row for row in ROWS["long"] if not row["completion"][0].isdigit()]
    folder, before = make_one_prompt("long", words)
    assert {len(row["prompt_ids"]) for row in rows_of(folder)} != set()
    _, after = make_one_prompt("long")
    assert (before.rows, after.rows) == (PROMPTS, PROMPTS)
    assert after.branches == 2 * before.branches
    with pytest.raises(FingerprintError, match=f"{PROMPTS} of its .* completions are not in"):
        make_one_prompt("long", [row for row in ROWS["long"] if row["score"] != 0])
