"""Damages cache folders, or signs wrong ones anew, and opens them as the commands do.

A case ends well if what is read is that of the whole folder, or, of one that was signed anew, what
another reader finds in it and a model can use; or if one message names the file or the unit.
"""

import contextlib
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from campaigns import damaged_caches, runner  # noqa: E402
from campaigns.cases import Campaign, End, tried  # noqa: E402
from campaigns.damaged_caches import UNFINISHED  # noqa: E402
from campaigns.damaged_tables import VOCABULARY  # noqa: E402
from campaigns.watched import Undamaged  # noqa: E402

from align.pipeline.precompute.export import export  # noqa: E402
from align.pipeline.precompute.inspect_rows import lines_of_inspection  # noqa: E402
from align.pipeline.precompute.verify import verify  # noqa: E402
from align.schemas.batches import Cursor  # noqa: E402
from align.schemas.config import ModelOptions  # noqa: E402
from align.schemas.errors import CorruptionError  # noqa: E402
from align.stages.feed.cache_index import ShardColumns  # noqa: E402
from align.stages.feed.conversions import ReadSpec  # noqa: E402
from align.stages.feed.loader import CacheFeed  # noqa: E402
from align.stages.feed.train_source import open_source, overlap  # noqa: E402
from align.stages.report.cache_summary import SHARD  # noqa: E402
from align.stages.score.reuse import EarlierCache, ReuseIndex  # noqa: E402
from align.stages.storage.cache.cache_folder import CacheFolder  # noqa: E402
from align.stages.storage.cache.manifest_file import load_manifest  # noqa: E402
from align.stages.storage.cache.shards import read_shard  # noqa: E402
from align.stages.storage.cache.verify_cache import check_before_reading, verify_cache  # noqa: E402
from support.shard_cache import settings_of  # noqa: E402
from support.stage_one import contents, run  # noqa: E402
from support.stub_reference import StubReference, StubScorer  # noqa: E402

KINDS = {"pairs": "labelled", "labels": "labelled", "scores": "grouped"}
DOORS = ("train", "train", "verify", "inspect", "rows", "export", "reuse")


def drawn(seed):
    """The kind of a cache, and what opens it."""
    draw = random.Random(f"cache folder {seed}")
    name = draw.choice([*KINDS, UNFINISHED])
    return draw, name, "resume" if name == UNFINISHED else draw.choice(DOORS)


def name_of(seed):
    """How the folder of a seed is opened, and its kind."""
    _, name, door = drawn(seed)
    return f"{door} {name}"


class Vocabulary(StubReference):
    """A reference that looks its tokens up, as a model does."""

    def open(self):
        """There is nothing to load."""
        return VocabularyScorer(StubReference().open().salt)


class VocabularyScorer(StubScorer):
    """Fails at tokens that it does not know, as an embedding does."""

    known = np.arange(VOCABULARY)

    def score(self, trees):
        """Scores one batch."""
        for tree in trees:
            for ids in (tree.prompt, *tree.branches):
                assert ids.min(initial=0) >= 0, "a negative id"
                self.known[ids]
        return super().score(trees)


def train(cache, name):
    """Every branch that a training reads in an epoch, scored."""
    folder, scorer = CacheFolder(cache), Vocabulary().open()
    spec = ReadSpec(KINDS[name], mismatched=name != "scores", eval_fraction=0.0)
    spec = replace(spec, needs_scores=name == "scores")
    source = open_source(folder, load_manifest(folder), spec, ShardColumns(check_before_reading))
    overlap(source, source)
    feed = CacheFeed(source, source, settings_of())
    found = set()
    with feed.steps(Cursor(0, 0)) as steps:
        for step in steps:
            for micro in (*step.own, *step.mismatched):
                assert len(scorer.score(micro.trees)) == len(micro.block.rows.completions.values)
                found |= branches_of(micro.block)
    return found


def branches_of(block):
    """The row, the prompt, the ids and the log-probs of each branch."""
    rows, tokens = block.rows, block.token_logps
    return {
        (
            rows.ids()[row],
            tuple(rows.prompts[row].tolist()),
            tuple(rows.completions[branch].tolist()),
            float(block.logps[branch]),
            tuple(tokens[branch].tolist()) if tokens else (),
        )
        for branch, row in enumerate(rows.row_of_branch.tolist())
    }


def branches_in(rows):
    """The same of rows that another reader found."""
    return {
        (
            row["row_id"],
            tuple(row["prompt_ids"]),
            tuple(ids),
            row["ref_logp"][at],
            tuple(row["ref_token_logps"][at]) if "ref_token_logps" in row else (),
        )
        for row in rows
        for at, ids in enumerate(row["completion_ids"])
    }


def verified(cache, _):
    """What is said of a cache that was scored again."""
    options = ModelOptions(path=str(Folders.bases / "tokenizer"))
    text = verify(
        cache, options, model=None, rescore=6, open_reference=lambda options: Vocabulary()
    )
    return text.split("root")[0]


def inspected(cache, _):
    """The summary of a cache, in words and in JSON, and its rejected rows."""
    folder, words = CacheFolder(cache), []
    for rejected, as_json in ((False, False), (False, True), (True, False)):
        how = {"row": None, "rejected": rejected, "as_json": as_json, "model": None}
        words += lines_of_inspection(folder, **how)
    return words


def shown_rows(cache, name):
    """Single rows by their place and by their id."""
    folder, words = CacheFolder(cache), []
    for row in ("1", "9", f"{Folders.ids[name][:9]}"):
        how = {"row": row, "rejected": False, "as_json": False, "model": None}
        words += lines_of_inspection(folder, **how)
    return words


def exported(cache, _):
    """The table that is made of a cache for other trainers."""
    target = cache.parent / "export.parquet"
    export(str(cache), target, model=None, overwrite=True)
    return pq.read_table(target).to_pylist()


def reused(cache, name):
    """The scores that another cache of the same rows would copy."""
    folder = CacheFolder(cache)
    manifest = load_manifest(folder)
    earlier = EarlierCache(folder, manifest.shards, same_ring=True)
    index = ReuseIndex([earlier], need_token_logps=False)
    found = set()
    for block in Folders.blocks[name]:
        known = index.find(block.rows, first_key="0", last_key="g")
        found |= {
            (tuple(block.rows.completions[at].tolist()), float(known.logps[at]))
            for at in np.flatnonzero(known.found).tolist()
        }
    return found


def resumed(cache, _):
    """What stage 1 makes of work that was broken off."""
    run(damaged_caches.config_of(Folders.bases, UNFINISHED, cache))
    made = contents(cache)
    with contextlib.suppress(CorruptionError):  # rot in a shard of before is found by who reads it
        verify_cache(CacheFolder(cache))
        return made
    return "refused by who reads it"


OPENED = {
    "train": train,
    "verify": verified,
    "inspect": inspected,
    "rows": shown_rows,
    "export": exported,
    "reuse": reused,
    "resume": resumed,
}


class Folders(Undamaged):
    """The undamaged caches, and what is read of them."""

    @classmethod
    def prepare(cls, folder):
        """Made once in a process."""
        cls.begin(folder)
        damaged_caches.make_caches(cls.bases)
        cls.rows = {name: damaged_caches.rows_in(cls.bases / name) for name in KINDS}
        cls.ids = {name: rows[0]["row_id"] for name, rows in cls.rows.items()}
        cls.blocks = {
            name: [read_shard(path) for path in sorted((cls.bases / name / "data").iterdir())]
            for name in KINDS
        }

    @classmethod
    def of_whole(cls, name, door):
        """What a door finds in an undamaged copy."""
        if (name, door) not in cls.whole:
            cls.whole[name, door] = OPENED[door](cls.copy(name), name)
        return cls.whole[name, door]

    @classmethod
    def copy(cls, name):
        """A fresh copy, always under the same path."""
        if (cls.folder / "case").exists():
            shutil.rmtree(cls.folder / "case")
        return Path(shutil.copytree(cls.bases / name, cls.folder / "case" / "cache"))


def case(seed, folder):
    """Opens a damaged cache."""
    draw, name, door = drawn(seed)
    whole = Folders.of_whole(name, door)
    cache = Folders.copy(name)
    done = damaged_caches.damage(cache, draw)
    with Folders.watch:
        judge = partial(judged, whole, name, door, done, cache)
        end = tried(lambda: OPENED[door](cache, name), done.files, judge)
    if Folders.watch.seen:
        end = replace(end, outcome="wrong", detail=f"it did {Folders.watch.seen[:2]}")
    return replace(end, detail=f"{done.what}: {end.detail}"[:700])


def judged(whole, name, door, done, cache, found):
    """Whether what was read is that of the whole folder, or fits what was signed."""
    # What is said of a cache that was verified is the same whatever it holds.
    if found == whole and not (door == "verify" and done.is_signed):
        return End("same")
    if door == "resume" and isinstance(found, str):
        return End("refused", found)
    if door == "reuse" and found < whole:
        return End("quarantined", f"{len(found)} of {len(whole)} are reused")
    if not done.is_signed:
        return End("wrong", f"{found!r:.200} and not {whole!r:.200}")
    try:
        # The summary reads no ids, so pages of them may be anything.
        rows = damaged_caches.rows_in(cache, [*SHARD] if door == "inspect" else None)
    except Exception as error:
        return End("wrong", f"it is read, and another reader says: {error}")
    if fault := next(damaged_caches.faults_of(rows, is_scored=door in {"train", "verify"}), ""):
        return End("wrong", f"{fault} is used")
    if door == "train" and not found <= branches_in(rows):
        return End("wrong", "other branches than are stored")
    return End("changed")


def without_digests():
    """Leaves out that a shard has to have the digest that was committed."""
    from align.stages.storage.cache import verify_cache  # noqa: PLC0415

    verify_cache._check = lambda *arguments: None


PLANTS = {"digests": without_digests}
CAMPAIGN = Campaign(__file__, name_of, case, Folders.prepare, PLANTS)

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
