"""Whole caches read back: what they hold against a slow reading of the data, row by row."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from align.schemas.config import DataOptions, TokenOptions
from align.schemas.rows import Role
from align.stages.demo.preferences import draw_preferences, transcript
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from support.stage_one import contents, run

SHAPES = ("paired", "paired_chat", "unpaired", "unpaired_chat", "scored", "scored_long")
PAIR = (Role.CHOSEN, Role.REJECTED)


@pytest.fixture(params=SHAPES)
def shape(request):
    return request.param


@pytest.fixture(params=[0, 1, 3], ids=["no pairs", "one pair", "three pairs"])
def num_pairs(request):
    return request.param


@pytest.fixture
def cached_rows(shape, num_pairs, config, data):
    """Every row of a finished cache of this shape."""
    config = replace(
        config,
        data=DataOptions(files=[str(getattr(data, shape))]),
        tokens=TokenOptions(max_length=2048),  # nothing is cut
        cache=replace(config.cache, kl_pairs=num_pairs, rows_per_shard=50),
    )
    manifest = run(config).manifest
    assert manifest.notes.get("mismatched_completions_used_twice", 0) == 0
    return rows_of(config.cache.output)


def rows_of(folder):
    manifest = load_manifest(CacheFolder(Path(folder)))
    files = [Path(folder) / "data" / commit.file for commit in manifest.shards]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def split(row, num_pairs):
    """A row's own branches, and its mismatched ones k by k; as (ids, role, score)."""
    scores = [None if score is None else float(score) for score in row["score"]]
    ids = [tuple(completion) for completion in row["completion_ids"]]
    branches = list(zip(ids, row["role"], scores, strict=True))
    count = len(branches) // (1 + num_pairs)
    assert count * (1 + num_pairs) == len(branches)
    levels = [branches[count * k : count * (k + 1)] for k in range(1 + num_pairs)]
    return levels[0], levels[1:]


@pytest.fixture
def by_hand(tokenizer_folder, data):
    """The rows of a file as (prompt, branches), each text tokenized by itself."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(prompt):
        if isinstance(prompt, str):
            return (bos, *ids(prompt))
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return tuple(ids(text))

    def completion_ids(completion):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        return (*ids(text), eos)

    def branches(record, shape):
        if shape.startswith("paired"):
            return [(record["chosen"], PAIR[0], None), (record["rejected"], PAIR[1], None)]
        if shape.startswith("unpaired"):
            role = Role.DESIRABLE if record["label"] else Role.UNDESIRABLE
            return [(record["completion"], role, None)]
        if shape == "scored":
            scored = zip(record["completions"], record["scores"], strict=True)
            return [(text, Role.CANDIDATE, score) for text, score in scored]
        return [(record["completion"], Role.CANDIDATE, record["score"])]

    def read(shape):
        return [
            (
                prompt_ids(record["prompt"]),
                [
                    (completion_ids(text), role, score)
                    for text, role, score in branches(record, shape)
                ],
            )
            for record in pq.read_table(getattr(data, shape)).to_pylist()
        ]

    return read


def plain(branches):
    """Roles as numbers, as they are stored; scores are what the data say to the last bit."""
    return [(ids, int(role), score) for ids, role, score in branches]


def test_the_cache_holds_each_record_as_it_is_tokenized_by_itself(
    cached_rows, by_hand, shape, num_pairs
):
    expected = by_hand(shape)
    if shape == "scored_long":
        joined = defaultdict(list)
        for prompt, branches in expected:
            joined[prompt] += branches
        found = {tuple(row["prompt_ids"]): split(row, num_pairs)[0] for row in cached_rows}
        assert len(found) == len(cached_rows)
        assert {prompt: Counter(plain(branches)) for prompt, branches in found.items()} == {
            prompt: Counter(plain(branches)) for prompt, branches in joined.items()
        }
        return
    assert sorted(row["source"]["row"] for row in cached_rows) == list(range(len(expected)))
    for row in cached_rows:
        prompt, branches = expected[row["source"]["row"]]
        assert tuple(row["prompt_ids"]) == prompt
        assert plain(split(row, num_pairs)[0]) == plain(branches)


def test_nothing_of_short_rows_is_cut_and_sums_are_sums(cached_rows):
    for row in cached_rows:
        assert row["prompt_cut"] == 0
        assert set(row["cut"]) == {0}
        assert row["num_tokens"] == [len(ids) for ids in row["completion_ids"]]
        for logp, tokens in zip(row["ref_logp"], row["ref_token_logps"], strict=True):
            assert logp == pytest.approx(sum(tokens), rel=1e-12)


def test_each_k_is_a_permutation_of_all_completions(cached_rows, num_pairs):
    own = Counter(ids for row in cached_rows for ids, _, _ in split(row, num_pairs)[0])
    for k in range(num_pairs):
        used = Counter(ids for row in cached_rows for ids, _, _ in split(row, num_pairs)[1][k])
        assert used == own


def test_a_mismatch_is_another_completion_of_another_prompt(cached_rows, num_pairs):
    prompts_of = defaultdict(set)
    for row in cached_rows:
        for ids, _, _ in split(row, num_pairs)[0]:
            prompts_of[ids].add(tuple(row["prompt_ids"]))
    for row in cached_rows:
        own, levels = split(row, num_pairs)
        for level in levels:
            for (mine, _, _), (theirs, role, score) in zip(own, level, strict=True):
                assert (role, score) == (Role.MISMATCHED, None)
                assert theirs != mine
                assert prompts_of[theirs] - {tuple(row["prompt_ids"])}


def test_the_partners_of_a_completion_differ_from_k_to_k(cached_rows, num_pairs):
    same = total = 0
    for row in cached_rows:
        for level in zip(*split(row, num_pairs)[1], strict=True):
            total += 1
            same += len({ids for ids, _, _ in level}) < num_pairs
    assert same <= 0.02 * total  # other prompts may have been given the same answer


def test_roles_are_those_of_the_shape(cached_rows, shape, num_pairs):
    for row in cached_rows:
        roles = tuple(role for _, role, _ in split(row, num_pairs)[0])
        if shape.startswith("paired"):
            assert roles == PAIR
        elif shape.startswith("unpaired"):
            assert len(roles) == 1
            assert roles[0] in {Role.DESIRABLE, Role.UNDESIRABLE}
        else:
            assert set(roles) == {Role.CANDIDATE}


@pytest.fixture
def growing(config, tmp_path):
    """A config over the first so many of 1,050 rows, in a folder of its own."""
    rows = [
        {
            "prompt": transcript(each.prompt),
            "chosen": " " + each.chosen.text,
            "rejected": " " + each.rejected.text,
        }
        for each in draw_preferences(1050, seed=8)
    ]

    def write(count):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        cache = replace(config.cache, output=str(tmp_path / str(count)), rows_per_shard=512)
        return replace(
            config, data=DataOptions(files=[str(path)]), tokens=TokenOptions(1024), cache=cache
        )

    return write


def test_five_percent_more_rows_leave_most_partners_alone(growing):
    before, after = ({}, {})
    for found, count in ((before, 1000), (after, 1050)):
        run(growing(count))
        for row in rows_of(growing(count).cache.output):
            (level,) = split(row, 1)[1]
            found[row["row_id"]] = [ids for ids, _, _ in level]
    assert set(before) < set(after)
    moved = sum(before[name] != after[name] for name in before)
    # A row that comes between a completion and its partner moves that one: about four rows each.
    assert 0 < moved < 6 * 50


def test_tokenizing_in_processes_leaves_the_same_bytes(to):
    found = []
    for workers in (0, 2):
        config = to(output=f"{to().cache.output}-{workers}")
        run(replace(config, data=replace(config.data, workers=workers)))
        found.append(contents(config.cache.output))
    assert found[0] == found[1]


@pytest.fixture
def tight(config, tokenizer_folder, tmp_path):
    """The config of unpaired rows, the first of which has room for one token."""

    def write(*texts):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        (prompt, _), *_ = texts
        room = len(tokenizer(prompt)["input_ids"]) + 1
        rows = [{"prompt": p, "completion": c, "label": len(p) > 2} for p, c in texts]
        path = tmp_path / "tight.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataOptions([str(path)], max_bad_frac=0.5)
        return replace(config, data=data, tokens=TokenOptions(room))

    return write


LONG_PROMPT = "word " * 20 + "end:"


def test_partners_that_cutting_makes_alike_are_replaced_and_counted(tight):
    others = [(f"{letter}:", f" yes perhaps {letter}") for letter in "ABCDEFGHIJ"]
    config = tight((LONG_PROMPT, " yes maybe so"), *others, ("Z:", " no"))
    manifest = run(config).manifest
    assert (manifest.quarantined, manifest.rows) == ({}, 12)
    assert manifest.notes["mismatched_completions_replaced_after_cutting"] == 1
    (cut,) = (row for row in rows_of(config.cache.output) if row["source"]["row"] == 0)
    (no,) = (row for row in rows_of(config.cache.output) if row["source"]["row"] == 11)
    assert cut["completion_ids"][1] == no["completion_ids"][0][:1]


def test_rows_that_cannot_have_a_mismatch_are_counted_out(tight):
    tight = tight((LONG_PROMPT, " yes maybe so"), ("Q:", " yes perhaps not"))
    manifest = run(tight).manifest
    assert manifest.quarantined == {"no_mismatch": 1}
    (entry,) = manifest.quarantine
    (bad,) = pq.read_table(Path(tight.cache.output) / entry.file).to_pylist()
    (entry,) = manifest.inputs
    place = (bad["file"], bad["file_name"], bad["row"])
    assert (*place, bad["reason"]) == (entry.sha256[:16], "tight.jsonl", 0, "no_mismatch")
    (row,) = rows_of(tight.cache.output)
    assert row["source"]["row"] == 1
    # The long row's completion had lost its end already: the mismatched branch says so.
    assert row["cut"][0] == 0 < row["cut"][1]
