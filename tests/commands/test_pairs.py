"""Whole caches read back: what they hold against a slow reading of the data, row by row."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from align.schemas.config import ModelOptions
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.errors import BadDataError
from align.schemas.rows import Role
from align.stages.data.tokenizer import load_tokenizer
from support.byte_tokenizers import byte_tokenizer
from support.read_rows import write_rows
from support.refusals import refuses
from support.stage_one import run
from support.stub_reference import StubReference


def rows_of(config):
    return pq.read_table(Path(config.cache.output) / "data").to_pylist()


def own_completions(row, num_pairs):
    """A row's own completions, which stand before the mismatched ones; as (ids, role, score)."""
    ids = [tuple(completion) for completion in row["completion_ids"]]
    completions = list(zip(ids, row["role"], row["score"], strict=True))
    count = len(completions) // (1 + num_pairs)
    assert count * (1 + num_pairs) == len(completions)
    return completions[:count]


def completions_of(record):
    """The completions of a row of the data, each with its role and score."""
    match record:
        case {"chosen": chosen, "rejected": rejected}:
            return [(chosen, Role.CHOSEN, None), (rejected, Role.REJECTED, None)]
        case {"completion": text, "label": label}:
            return [(text, Role.DESIRABLE if label else Role.UNDESIRABLE, None)]
        case {"completion": text, "score": score}:
            return [(text, Role.CANDIDATE, score)]
        case {"completions": texts, "scores": scores}:
            return [(one, Role.CANDIDATE, score) for one, score in zip(texts, scores, strict=True)]


@pytest.fixture
def by_hand(tokenizer_folder, data):
    """The rows of a file as (prompt, completions), each text tokenized by itself."""
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
            own = completions_of(record)
            yield prompt_ids(record["prompt"]), [(completion_ids(c), *rest) for c, *rest in own]

    return read


@pytest.mark.parametrize(
    ("shape", "num_pairs"),
    [
        *(("paired", 1), ("paired_chat", 3), ("unpaired", 3), ("unpaired_chat", 0)),
        *(("scored", 1), ("scored_long", 3)),
    ],
)
def test_a_cache_holds_each_record_as_tokenized_alone(config, data, by_hand, shape, num_pairs):
    config = replace(
        config,
        data=DataOptions(files=[str(getattr(data, shape))]),
        tokens=TokenOptions(max_length=2048),  # nothing is cut
        cache=replace(config.cache, kl_pairs=num_pairs, shards=3),
    )
    run(config)
    rows, expected = rows_of(config), list(by_hand(shape))
    if shape == "scored_long":
        joined = defaultdict(Counter)
        for prompt, completions in expected:
            joined[prompt].update(completions)
        found = {tuple(row["prompt_ids"]): Counter(own_completions(row, num_pairs)) for row in rows}
        assert len(found) == len(rows)
        assert found == joined
    else:
        assert sorted(row["source"]["row"] for row in rows) == list(range(len(expected)))
        for row in rows:
            own = own_completions(row, num_pairs)
            assert (tuple(row["prompt_ids"]), own) == expected[row["source"]["row"]]
    require_sums(rows)


def require_sums(rows):
    """Nothing is cut, and the log-probs of a completion are the sum of those of its tokens."""
    for row in rows:
        assert (row["prompt_cut"], {*row["cut"]}) == (0, {0})
        assert row["num_tokens"] == [len(ids) for ids in row["completion_ids"]]
        for logp, tokens in zip(row["ref_logp"], row["ref_token_logps"], strict=True):
            assert logp == pytest.approx(sum(tokens), rel=1e-12)


def test_a_row_without_a_mismatch_is_rejected(config, tokenizer_folder, tmp_path):
    prompt = "word " * 20 + "end:"  # there is room for one token more
    rows = [
        {"prompt": prompt, "completion": " yes maybe so", "label": True},
        {"prompt": "Q:", "completion": " yes perhaps not", "label": False},
    ]
    room = len(AutoTokenizer.from_pretrained(tokenizer_folder)(prompt)["input_ids"]) + 1
    data = DataOptions([write_rows(tmp_path / "tight.jsonl", rows)], max_bad_frac=0.5)
    config = replace(config, data=data, tokens=TokenOptions(room))
    manifest = run(config).manifest
    assert manifest.reasons == {"no_mismatch": 1}
    (of_data,) = manifest.inputs
    (bad,) = pq.read_table(Path(config.cache.output) / manifest.rejected.file).to_pylist()
    assert (bad["file"], bad["row"]) == (of_data.sha256[:16], 0)
    (row,) = rows_of(config)
    assert row["source"]["row"] == 1
    # The long row's completion had lost its end already: the mismatched completion says so.
    assert row["cut"][0] == 0 < row["cut"][1]


def answers_of(number):
    """The blank before a word is a part of the word's token; that before a digit is not."""
    return [f"{number}", f"about {number}", f"{2 * number}", f"hello {number} or {2 * number}"]


def test_a_prompt_that_ends_inside_a_token_is_one_group(config, tmp_path):
    words = {"added": [" about", " hello"], "eos": "<e>", "template": None}
    model = ModelOptions(path=byte_tokenizer(tmp_path / "model", ["<e>"], **words))
    texts = [(f"What is {n}? Answer: ", answers_of(n)) for n in range(1, 41)]
    long = [
        {"prompt": prompt, "completion": answer, "score": place}
        for prompt, answers in texts
        for place, answer in enumerate(answers)
    ]
    labels = [
        {"prompt": prompt, "completion": answer, "label": 1}
        for prompt, answers in texts
        for answer in answers
    ]

    def made(name, rows):
        data = DataOptions(files=[write_rows(tmp_path / "rows.jsonl", rows)])
        cache = replace(config.cache, output=str(tmp_path / name), kl_pairs=0)
        made = replace(config, model=model, data=data, cache=cache)
        return run(made).manifest, rows_of(made)

    decode = load_tokenizer(model.path, TokenOptions()).backend.decode
    alone = made("labels", labels)[1]
    assert len({tuple(row["prompt_ids"]) for row in alone}) == 2 * 40
    # Whatever its ids are, a prompt is held out or learned from.
    asked = [decode(row["prompt_ids"]).partition(" Answer")[0] for row in alone]
    assert len(set(zip(asked, (row["split_key"] for row in alone), strict=True))) == 40
    found = made("long", long)[1]
    assert len({row["prompt_key"] for row in found}) == len(found) == 40
    for row in found:
        own = zip(row["completion_ids"], row["score"], strict=True)
        written = {(decode(row["prompt_ids"] + ids), score) for ids, score in own}
        (place,) = {int(text.split()[2].rstrip("?")) for text, _ in written}
        prompt, answers = texts[place - 1]
        assert written == {(prompt + one, score) for score, one in enumerate(answers)}


@pytest.mark.parametrize(("same", "answers"), [(0.6, [*range(50)]), (0.0, ["yes"])])
def test_unpairable_data_are_refused_before_a_model_is_loaded(config, tmp_path, same, answers):
    """More than half of the completions answer one prompt, or all of them are equal."""
    rows = [
        {
            "prompt": "The same?" if number < 100 * same else f"Number {number}?",
            "completion": f"{answers[number % len(answers)]}",
            "label": True,
        }
        for number in range(100)
    ]
    config = replace(config, data=DataOptions(files=[write_rows(tmp_path / "rows.jsonl", rows)]))
    with refuses(BadDataError, "--kl-pairs 0") as caught:
        run(config, StubReference(opening=partial(pytest.fail, "the model is loaded")))
    assert caught.value.exit_code == 3
    assert not Path(config.cache.output, "manifest.json").exists()
    assert run(replace(config, cache=replace(config.cache, kl_pairs=0))).manifest.rows
