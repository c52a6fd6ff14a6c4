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
from support.stage_one import run

PAIR = (Role.CHOSEN, Role.REJECTED)


def rows_of(config):
    return pq.read_table(Path(config.cache.output) / "data").to_pylist()


def split(row, num_pairs):
    """A row's own branches, and its mismatched ones k by k; as (ids, role, score)."""
    ids = [tuple(completion) for completion in row["completion_ids"]]
    branches = list(zip(ids, row["role"], row["score"], strict=True))
    count = len(branches) // (1 + num_pairs)
    assert count * (1 + num_pairs) == len(branches)
    levels = [branches[count * k : count * (k + 1)] for k in range(1 + num_pairs)]
    return levels[0], levels[1:]


def branches_of(record, shape):
    """The completions of a row of the data, each with its role and score."""
    if shape.startswith("paired"):
        return [(record["chosen"], PAIR[0], None), (record["rejected"], PAIR[1], None)]
    if shape.startswith("unpaired"):
        role = Role.DESIRABLE if record["label"] else Role.UNDESIRABLE
        return [(record["completion"], role, None)]
    if shape == "scored":
        scored = zip(record["completions"], record["scores"], strict=True)
        return [(text, Role.CANDIDATE, score) for text, score in scored]
    return [(record["completion"], Role.CANDIDATE, record["score"])]


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

    def read(shape):
        for record in pq.read_table(getattr(data, shape)).to_pylist():
            own = branches_of(record, shape)
            yield prompt_ids(record["prompt"]), [(completion_ids(c), *rest) for c, *rest in own]

    return read


@pytest.mark.parametrize(
    ("shape", "num_pairs"),
    [
        ("paired", 1),
        ("paired_chat", 3),
        ("unpaired", 3),
        ("unpaired_chat", 0),
        ("scored", 1),
        ("scored_long", 0),
        ("scored_long", 3),
    ],
)
def test_the_cache_holds_each_record_as_it_is_tokenized_by_itself_and_its_mismatches(
    config, data, by_hand, shape, num_pairs
):
    config = replace(
        config,
        data=DataOptions(files=[str(getattr(data, shape))]),
        tokens=TokenOptions(max_length=2048),  # nothing is cut
        cache=replace(config.cache, kl_pairs=num_pairs, rows_per_shard=50),
    )
    run(config)
    rows, expected = rows_of(config), list(by_hand(shape))
    if shape == "scored_long":
        joined = defaultdict(Counter)
        for prompt, branches in expected:
            joined[prompt].update(branches)
        found = {tuple(row["prompt_ids"]): Counter(split(row, num_pairs)[0]) for row in rows}
        assert len(found) == len(rows)
        assert found == joined
    else:
        assert sorted(row["source"]["row"] for row in rows) == list(range(len(expected)))
        for row in rows:
            own = split(row, num_pairs)[0]
            assert (tuple(row["prompt_ids"]), own) == expected[row["source"]["row"]]
    require_sums(rows)
    require_mismatches(rows, num_pairs)


def require_sums(rows):
    """Nothing is cut, and the log-probs of a completion are the sum of those of its tokens."""
    for row in rows:
        assert (row["prompt_cut"], {*row["cut"]}) == (0, {0})
        assert row["num_tokens"] == [len(ids) for ids in row["completion_ids"]]
        for logp, tokens in zip(row["ref_logp"], row["ref_token_logps"], strict=True):
            assert logp == pytest.approx(sum(tokens), rel=1e-12)


def require_mismatches(rows, num_pairs):
    """Each k is a permutation of all completions, and no partner answers the same prompt."""
    prompts_of, used = defaultdict(set), [Counter() for _ in range(1 + num_pairs)]
    for row in rows:
        own, levels = split(row, num_pairs)
        for count, level in zip(used, (own, *levels), strict=True):
            count.update(ids for ids, _, _ in level)
        for ids, _, _ in own:
            prompts_of[ids].add(tuple(row["prompt_ids"]))
    assert all(count == used[0] for count in used)
    same = total = 0
    for row in rows:
        own, levels = split(row, num_pairs)
        for level in levels:
            for (mine, _, _), (theirs, role, score) in zip(own, level, strict=True):
                assert (role, score) == (Role.MISMATCHED, None)
                assert theirs != mine
                assert prompts_of[theirs] - {tuple(row["prompt_ids"])}
        for partners in zip(*levels, strict=True):
            total += 1
            same += len({ids for ids, _, _ in partners}) < num_pairs
    assert same <= 0.02 * total  # other prompts may have been given the same answer


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
    (cut,) = (row for row in rows_of(config) if row["source"]["row"] == 0)
    (no,) = (row for row in rows_of(config) if row["source"]["row"] == 11)
    assert cut["completion_ids"][1] == no["completion_ids"][0][:1]


def test_rows_that_cannot_have_a_mismatch_are_counted_out(tight):
    config = tight((LONG_PROMPT, " yes maybe so"), ("Q:", " yes perhaps not"))
    manifest = run(config).manifest
    assert manifest.quarantined == {"no_mismatch": 1}
    (entry,), (of_data,) = manifest.quarantine, manifest.inputs
    (bad,) = pq.read_table(Path(config.cache.output) / entry.file).to_pylist()
    found = (bad["file"], bad["file_name"], bad["row"], bad["reason"])
    assert found == (of_data.sha256[:16], "tight.jsonl", 0, "no_mismatch")
    (row,) = rows_of(config)
    assert row["source"]["row"] == 1
    # The long row's completion had lost its end already: the mismatched branch says so.
    assert row["cut"][0] == 0 < row["cut"][1]
