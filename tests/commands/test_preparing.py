"""Any processes encode the slices, in any order; what they end in never shows it."""

import multiprocessing
import os
import pickle
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from align.pipeline.precompute.opening import open_job
from align.pipeline.precompute.prepare import Encode, Slices, encode, make_plan
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.errors import BadDataError, Interrupted
from align.schemas.row_table import Rows
from align.stages.data import files as data_files
from align.stages.data.encode import Encoder, InputCounts
from align.stages.data.row_keys import key_rows
from align.stages.data.text_rows import text_rows_in
from align.stages.pairing import partition
from align.stages.pairing.long_form import merge_same_prompts
from align.stages.storage.cache_work import printable
from align.stages.tracking.progress import Progress
from support.encoded_rows import plain
from support.patience import PATIENCE
from support.read_rows import parted, write_rows
from support.stage_one import CHILDREN, contents, run
from support.stub_reference import StubReference

SEED = int(os.environ.get("ALIGN_TEST_SEED", "20"))
WORDS = ["alpha", "Beta", "gamma,", "δelta", "  ", "eps\nilon", "42", "is", "yes", "👋", "a" * 40]
KINDS = ("paired", "unpaired", "scored", "scored_long")
ENDINGS = (".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".arrow")


def small_sizes(draw):
    """Sizes of slices, ranges and portions, most of them tiny: module, name and size."""
    return [
        (data_files, "LEAST_SLICE", draw.choice([300, 2000, 1 << 21])),
        (data_files, "SLICES", draw.choice([2, 64, 10**6])),
        (partition, "BYTES_PER_RANGE", draw.choice([500, 3000, 8 << 20])),
        (partition, "MOST_RANGES", draw.choice([4, 32])),
        (partition, "ROWS_PER_SHARD", draw.choice([5, 40])),
        (partition, "TOKENS_PER_PORTION", draw.choice([300, 3000, 1 << 22])),
    ]


def draw_files(folder, kind, draw):
    """Some files of one kind of data."""
    folder.mkdir(parents=True)
    files = []
    for number in range(draw.randint(1, 4)):
        path = folder / f"data-{number}{draw.choice(ENDINGS)}"
        rows = _rows(kind, draw.choice([20, 33, 100]), draw)
        write_rows(path, rows, row_group_size=draw.choice([7, 50, 10_000]))
        files.append(path)
    if draw.random() < 0.2:
        files.append(folder / f"copy{files[0].suffix}")
        shutil.copy(files[0], files[-1])
    return files


def _text(draw):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))


def _rows(kind, count, draw):
    prompts = [
        _text(draw) for _ in range(max(3, draw.choice([count // 5, count, count // 40 + 3])))
    ]
    answers = [_text(draw) for _ in range(max(4, draw.choice([5, count // 4, count])))]
    rows = []
    for _ in range(count):
        rows.append(_row(kind, draw.choice(prompts), answers, draw))
        if draw.random() < 0.1:
            rows.append(dict(rows[-1]))
    return rows


def _row(kind, prompt, answers, draw):
    is_bad = draw.random() < 0.04
    answer = "" if is_bad else draw.choice(answers)
    if kind == "paired":
        return {"prompt": prompt, "chosen": draw.choice(answers), "rejected": answer}
    if kind == "unpaired":
        return {"prompt": prompt, "completion": answer, "label": draw.random() < 0.5}
    if kind == "scored_long":
        prompt += draw.choice(["", "", " "])  # so that some prompts have two tokenizations
        return {"prompt": prompt, "completion": answer, "score": float(draw.randint(0, 3))}
    count = draw.randint(1, 4)
    scores = [float(draw.randint(0, 3)) for _ in range(count - is_bad)]
    completions = [draw.choice(answers) for _ in range(count)]
    return {"prompt": prompt, "completions": completions, "scores": scores}


# The same in one process and in memory.


@dataclass(frozen=True)
class Prepared:
    """Everything that preparing decides."""

    rows: list  # in key order
    places: list  # of the rows before those of one prompt are joined
    can_be_paired: bool
    rejected: list
    rows_per_file: dict
    reasons: dict


def prepared_at_once(job):
    """Reads all rows and sorts them with Python's sort."""
    config, intake, parts = job.config, InputCounts(), []
    encoder = Encoder(job.tokenizer, config.tokens)
    for number, file in enumerate(job.inputs):
        found = encoder.encode(text_rows_in(file, job.shape, job.files[number]))
        rows, rejected = parted(found)
        parts.append(key_rows(rows, carried=job.shape.carried))
        intake.rows_per_file[number] += len(rows) + len(rejected)
        intake.rejected += rejected
    keyed = _sorted(Rows.concat(parts))
    prompts = Counter(keyed.range_keys[keyed.row_of_completion].tolist())
    can_be_paired = 2 * max(prompts.values(), default=0) <= prompts.total()
    can_be_paired &= len({*keyed.completion_key.tolist()}) > 1
    places = keyed.range_keys.tolist()
    if job.shape.name == "scored_long":
        side = config.tokens.prompt_side
        keyed = merge_same_prompts(keyed, intake.notes, prompt_side=side)
    rejected = [
        replace(one, detail=printable(one.detail))
        for one in sorted(intake.rejected, key=lambda one: (job.files.index(one.file), one.row))
    ]
    reasons = Counter(one.reason for one in rejected)
    rows = _copies(plain(keyed))
    per_file = dict(intake.rows_per_file)
    return Prepared(rows, places, can_be_paired, rejected, per_file, dict(reasons))


def _sorted(rows):
    """By place, by digest, and of equal rows by file and number."""
    ids, places = rows.ids(), rows.range_keys.tolist()

    def key(at):
        return places[at], ids[at], int(rows.file[at]), int(rows.row[at])

    order = sorted(range(len(places)), key=key)
    return rows.take(np.array(order, dtype=np.int64))


def _copies(rows):
    seen, numbered = Counter(), []
    for row in rows:
        numbered.append(row._replace(copy=seen[row.row_id]))
        seen[row.row_id] += 1
    return numbered


@pytest.fixture
def drawn(config, tmp_path):
    """A config over data and settings drawn by chance."""

    def draw(seed):
        chance = random.Random(f"{SEED} {seed}")
        files = draw_files(tmp_path / f"data-{seed}", KINDS[seed % len(KINDS)], chance)
        data = DataOptions(files=list(map(str, files)), max_bad_frac=0.9)
        tokens = TokenOptions(
            max_length=chance.choice([40, 256]),
            max_prompt_length=chance.choice([0, 10]),
            prompt_side=chance.choice(["left", "right"]),
        )
        cache = replace(
            config.cache,
            output=str(tmp_path / f"cache-{seed}"),
            kl_pairs=chance.randint(0, 3),
            shards=chance.choice([0, 0, 1, 7]),
        )
        return replace(config, data=data, tokens=tokens, cache=cache)

    return draw


def encode_in_any_order(job, draw):
    """Encodes every slice, some of them twice, each after a journey through pickle."""
    job.cache.prepare()
    job.cache.prepare_work()
    slices = Slices.of(job)
    order = [*range(len(slices.sizes)), draw.randrange(len(slices.sizes))]
    draw.shuffle(order)
    for number in order:
        pickle.loads(pickle.dumps(Encode(slices)))(number)
    return {"slices": len(slices.sizes), "ranges": slices.ranges}


def planned(job, progress=None):
    """Encodes what is missing, and plans."""
    progress = progress or Progress()
    encoded = encode(Slices.of(job), job.config, None, progress=progress)
    return make_plan(job, encoded, progress)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.long)])
def test_slices_in_any_order_end_in_what_one_process_makes_in_memory(drawn, monkeypatch, seeds):
    counts = Counter()
    for seed in seeds:
        config = drawn(seed)
        draw = random.Random(f"order {SEED} {seed}")
        with monkeypatch.context() as patch:
            for module, name, size in small_sizes(draw):
                patch.setattr(module, name, size)
            job = open_job(config, StubReference())
            counts.update(encode_in_any_order(job, draw))
            expected = prepared_at_once(job)
            try:
                plan = planned(job)
            except BadDataError:
                is_much = sum(expected.reasons.values()) > 0.9 * sum(
                    expected.rows_per_file.values()
                )
                assert is_much or (config.cache.kl_pairs and not expected.can_be_paired)
                continue
            assert expected.can_be_paired or not config.cache.kl_pairs
            require_equal(job, plan, expected)
    assert counts["slices"] > 3 * len(seeds)
    assert counts["ranges"] > 2 * len(seeds)


def require_equal(job, plan, expected):
    count, is_long = len(plan.shards), job.shape.declared.is_long
    encoded = Slices.of(job).encoded()
    rows = encoded.rows(
        shards=count, prompt_side=job.config.tokens.prompt_side if is_long else None
    )
    found = [rows.read(shard, Counter()) for shard in range(count)]
    assert [row for keyed in found if keyed for row in plain(keyed)] == expected.rows
    numbers = Counter(place * count >> 64 for place in expected.places)
    assert plan.shards == tuple(numbers[shard] for shard in range(count))
    assert [entry.rows for entry in plan.inputs] == list(expected.rows_per_file.values())
    assert plan.reasons == expected.reasons
    assert [*plan.rejected] == expected.rejected


class Impatient(Progress):
    """Asks to stop after some slices."""

    left = 4

    def advance(self, done, *, tokens=0, padding=0):
        """Counts them, and then asks."""
        self.left -= 1
        if self.left == 0:
            raise Interrupted(2)


def test_interrupted_children_keep_what_is_committed(config, data, tmp_path, monkeypatch):
    """Its few rows are cut into many slices, which two children encode."""
    config = replace(config, data=DataOptions(files=[str(data.paired_jsonl)], workers=2))
    run(replace(config, cache=replace(config.cache, output=str(tmp_path / "clean"))))
    monkeypatch.setattr(data_files, "LEAST_SLICE", 1000)
    monkeypatch.setattr(data_files, "SLICES", 10)
    job = open_job(config, StubReference())
    job.cache.prepare()
    job.cache.prepare_work()
    other = CHILDREN.Process(target=time.sleep, args=(PATIENCE,))  # of whoever calls it
    other.start()
    with pytest.raises(Interrupted):
        planned(job, Impatient())
    # Whoever is interrupted waits for no child.
    assert multiprocessing.active_children() == [other]
    other.kill()
    other.join()
    slices = Slices.of(job)
    done = [*map(slices.find, range(len(slices.sizes)))]
    assert 3 <= len(done) - done.count(None) < len(done)
    run(config)
    assert contents(config.cache.output) == contents(tmp_path / "clean")
