"""Whole caches: no partner answers its own prompt or is its own text, and each is used in turn."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.parts import Part
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.errors import BadDataError
from align.stages.storage.cache.cache_folder import CacheFolder
from support.read_rows import write_rows
from support.stage_one import contents, run
from support.stub_reference import StubReference


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
    "short rows": Case([*pairs(600)], {"shards": 4}),
    "four partners": Case([*pairs(300)], {"kl_pairs": 4, "shards": 2}),
    "five rows a shard": Case([*pairs(100)], {"shards": 20, "kl_pairs": 2}, most_uses=4),
    "many files": Case([*pairs(300)], {"shards": 3}, files=150),
    "long form": Case([*scores(300)], {"shards": 4}),
    "one prompt of 40 %": Case([*labels(500, same=0.4)], {"shards": 4}, most_uses=6),
    "two answers": Case([*labels(400, answers=["yes", "no"])], {"shards": 4}, most_uses=10**6),
    "cut": Case(
        [*pairs(200, lengths=((24, 3), (2, 12)))],
        {"shards": 4},
        most_uses=10**6,
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


@pytest.mark.parametrize("name", CASES)
def test_partners_are_of_other_prompts_and_other_texts(config, tmp_path, name):
    case = CASES[name]
    config = with_rows(config, tmp_path / "data", case)
    manifest = run(config).manifest
    assert manifest.reasons == {}
    rows = pq.read_table(Path(config.cache.output) / "data").to_pylist()
    num_pairs = config.cache.kl_pairs
    prompts, own_texts = defaultdict(set), Counter()
    for row in rows:
        for ids in row["completion_ids"][: len(row["role"]) // (1 + num_pairs)]:
            prompts[tuple(ids)].add(row["prompt_key"])
            own_texts[tuple(ids)] += 1
    used, cut = Counter(), 0
    for row in rows:
        own = len(row["role"]) // (1 + num_pairs)
        for place in range(own, len(row["role"])):
            ids = tuple(row["completion_ids"][place])
            assert ids != tuple(row["completion_ids"][place % own])
            if row["cut"][place]:
                cut += 1
                continue
            assert prompts[ids] - {row["prompt_key"]}
            used[place // own, ids] += 1
    assert (cut > 0) == (name == "cut")
    assert cut + used.total() == num_pairs * own_texts.total()
    assert all(count <= case.most_uses * own_texts[ids] for (_, ids), count in used.items())


class Unopened(StubReference):
    def open(self):
        pytest.fail("the model is loaded")


@pytest.mark.parametrize(
    "case",
    [
        Case([*labels(500, same=0.6)], {"shards": 4}),
        Case([*labels(500, same=0.6)], {}, files=50),
        Case([*labels(300, answers=["yes"])]),
    ],
)
def test_data_that_cannot_be_paired_are_refused_before_a_model_is_loaded(config, tmp_path, case):
    config = with_rows(config, tmp_path / "data", case)
    with pytest.raises(BadDataError, match="--kl-pairs 0"):
        run(config, Unopened())
    assert not CacheFolder(Path(config.cache.output)).manifest_file.exists()
    assert run(replace(config, cache=replace(config.cache, kl_pairs=0))).manifest.rows


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_parts_any_order_of_files_and_children_make_the_same_bytes(
    config, tmp_path, count
):
    case = CASES["many files"]
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
