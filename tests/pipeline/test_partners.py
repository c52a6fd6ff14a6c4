"""Whole caches: no partner answers its own prompt or is its own text, and each is used in turn."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.parts import Part
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.errors import BadDataError
from support.read_rows import write_rows
from support.refusals import refuses
from support.stage_one import contents, run
from support.stub_reference import StubReference

MISMATCHED = 5  # the role of a partner


def words(draw, count):
    return " ".join(f"{draw.randrange(400)}" for _ in range(count))


def pairs(count, *, lengths=((4, 3),)):
    """So many pairs; in turn the words of the prompt, and those of a completion at most."""
    draw = random.Random(count)
    for number in range(count):
        prompt, most = lengths[number % len(lengths)]
        one, other = words(draw, most), words(draw, draw.randint(1, most))
        yield {"prompt": words(draw, prompt), "chosen": one, "rejected": other}


def labels(count, *, same=0.0, answers=()):
    """So many labelled completions, of which a share answers one prompt."""
    draw = random.Random(count)
    for number in range(count):
        answer = draw.choice(answers) if answers else words(draw, 4)
        prompt = "The same?" if number < same * count else words(draw, 4)
        yield {"prompt": prompt, "completion": answer, "label": draw.random() < 0.5}


def scores(count):
    draw = random.Random(count)
    for number in range(count):
        yield {
            "prompt": f"Number {number % (count // 5)}?",
            "completion": words(draw, 4),
            "score": 1.0,
        }


@dataclass(frozen=True)
class Case:
    rows: list
    settings: dict = field(default_factory=dict)
    files: int = 1
    most_uses: int = 1  # of a completion for each k, where none is cut
    max_length: int = 256


CASES = {
    "10,000 short rows": Case([*pairs(10_000)], {"shards": 10}),
    "four partners": Case([*pairs(300)], {"kl_pairs": 4, "shards": 2}),
    "five rows a shard": Case([*pairs(100)], {"shards": 20, "kl_pairs": 2}, most_uses=4),
    "300 files": Case([*pairs(600)], {"shards": 3}, files=300),
    "3,000 files": Case([*pairs(3000)], {"shards": 3}, files=3000),
    "long form": Case([*scores(300)], {"shards": 4}),
    "one prompt of 40 %": Case([*labels(500, same=0.4)], {"shards": 4}, most_uses=6),
    "two answers": Case([*labels(400, answers=["yes", "no"])], {"shards": 4}, most_uses=2),
    "cut": Case(
        [*pairs(200, lengths=((24, 3), (2, 12)))],
        {"shards": 4},
        most_uses=4,
        max_length=76,
    ),
}


def with_rows(config, folder, case):
    """The config over the case's rows, in files of about equal size."""
    folder.mkdir(exist_ok=True)
    step = -(-len(case.rows) // case.files)
    parts = [case.rows[start : start + step] for start in range(0, len(case.rows), step)]
    files = [
        str(write_rows(folder / f"{number:04}.jsonl", part)) for number, part in enumerate(parts)
    ]
    return replace(
        config,
        data=DataOptions(files=files),
        tokens=TokenOptions(max_length=case.max_length),
        cache=replace(config.cache, **case.settings),
    )


def completions_in(cache, num_pairs):
    """The key of each completion's prompt, its ids, and the ids and lost tokens of its partners."""
    columns = ["prompt_key", "completion_ids", "role", "cut"]
    for row in pq.read_table(Path(cache) / "data", columns=columns).to_pylist():
        every = [tuple(ids) for ids in row["completion_ids"]]
        own = row["role"].index(MISMATCHED)
        assert row["role"][own:] == [MISMATCHED] * own * num_pairs
        for index, ids in enumerate(every[:own]):
            partners = zip(every[own + index :: own], row["cut"][own + index :: own], strict=True)
            yield row["prompt_key"], ids, [*partners]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "3,000 files")) for name in CASES],
)
def test_partners_are_of_other_prompts_and_used_in_turn(config, tmp_path, name):
    case = CASES[name]
    config = with_rows(config, tmp_path / "data", case)
    manifest = run(config).manifest
    assert (manifest.rows_in, manifest.rejected) == (len(case.rows), None)
    num_pairs = config.cache.kl_pairs
    completions = [*completions_in(config.cache.output, num_pairs)]
    prompts, times = defaultdict(set), Counter()
    for prompt, ids, _ in completions:
        prompts[ids].add(prompt)
        times[ids] += 1
    uses, num_cut = Counter(), 0
    for prompt, ids, partners in completions:
        for k, (partner, cut) in enumerate(partners):
            assert partner != ids
            if cut:
                num_cut += 1
                whole = (one for one in prompts if one[: len(partner)] == partner)
                assert any(prompts[one] - {prompt} for one in whole)
            else:
                assert prompts[partner] - {prompt}
                uses[k, partner] += 1
        every = [ids, *(partner for partner, _ in partners)]
        assert len({*every}) == len(every) or any(times[one] > 1 for one in every)
    assert (num_cut > 0) == (name == "cut")
    assert num_cut + uses.total() == num_pairs * len(completions)
    assert all(count <= case.most_uses * times[ids] for (_, ids), count in uses.items())


@pytest.mark.parametrize(
    "case",
    [
        Case([*labels(500, same=0.6)], {"shards": 4}),
        Case([*labels(500, same=0.6)], {}, files=50),
        Case([*labels(300, answers=["yes"])]),
    ],
)
def test_unpairable_data_are_refused_before_a_model_is_loaded(config, tmp_path, case):
    config = with_rows(config, tmp_path / "data", case)
    with refuses(BadDataError, "--kl-pairs 0") as caught:
        run(config, StubReference(opening=partial(pytest.fail, "the model is loaded")))
    assert caught.value.exit_code == 3
    assert not Path(config.cache.output, "manifest.json").exists()
    assert run(replace(config, cache=replace(config.cache, kl_pairs=0))).manifest.rows


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_and_children_make_the_same_bytes(config, tmp_path, count):
    case = CASES["300 files"]
    whole = with_rows(config, tmp_path / "data", case)
    run(whole)
    parts = replace(
        whole,
        data=DataOptions(files=whole.data.files[::-1], workers=2),
        cache=replace(whole.cache, output=str(tmp_path / "parts")),
    )
    for number in random.Random(count).sample(range(1, count + 1), count):
        run(parts, part=Part(number, count))
    assert contents(parts.cache.output) == contents(whole.cache.output)
