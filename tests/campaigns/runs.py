"""Damages the folders of trainings, or signs wrong ones anew, and opens them as the commands do.

A case ends well if what comes of it is what comes of the whole folder, bit for bit, also where an
earlier checkpoint had to do; or, of one that was signed anew, what a run may hold; or if one
message names the file or a folder that it is in.
"""

import json
import math
import os
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from campaigns import damaged_runs, runner  # noqa: E402
from campaigns.cases import Campaign, End, tried  # noqa: E402
from campaigns.watched import Watch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from align.pipeline.commands.python_api import load_run  # noqa: E402
from align.pipeline.options.settings import load_settings  # noqa: E402
from align.pipeline.plan.fitted_batches import note_fitting  # noqa: E402
from align.pipeline.train.run_report import write_report  # noqa: E402
from align.pipeline.train.sweep import sweep  # noqa: E402
from align.pipeline.train.train import run_training  # noqa: E402
from align.pipeline.train.training_job import open_training  # noqa: E402
from align.pipeline.train.trials import trials_of  # noqa: E402
from align.schemas.errors import UsageError  # noqa: E402
from align.stages.demo.tiny_tokenizer import make_tokenizer  # noqa: E402
from align.stages.storage.cache.cache_folder import OutputFolder  # noqa: E402
from align.stages.storage.run.run_folder import RunFolder  # noqa: E402
from align.stages.tracking.outbox import open_ledger  # noqa: E402
from align.stages.tracking.progress import NoProgress  # noqa: E402
from align.stages.tracking.tracker import MAIN, kind_of  # noqa: E402
from support.stage_one import contents  # noqa: E402
from support.training_world import make_pairs, scored  # noqa: E402
from support.trainings import learned  # noqa: E402

PAUSED, FINISHED = "paused", "finished"
TOKENS = 100_000  # more than a step has
SETTINGS = {
    "train.schedule": "constant",
    "train.warmup": 0.0,
    "train.log_every": 5,
    "train.batch_size": 4,
    "train.epochs": 4,
    "train.max_steps": 6,
    "train.lr": 1e-3,
    "train.eval_fraction": 0.2,
    "train.eval_every": 3,
    "train.save_every": 2,
    "train.dtype": "float32",
    "train.dropout": True,
    "train.tokens_per_batch": TOKENS,
    "tracking.mlflow": False,
}
ADAM = {"torch_adam": True, "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
DOORS = {
    PAUSED: ("resume", "resume", "resume", "resized", "report", "load"),
    FINISHED: ("again", "again", "longer", "sweep", "policy", "report", "load"),
}


def drawn(seed):
    """Whether the run of a seed is finished, and what opens it."""
    draw = random.Random(f"run folder {seed}")
    name = draw.choice((PAUSED, PAUSED, FINISHED))
    return draw, name, draw.choice(DOORS[name])


def name_of(seed):
    """How the folder of a seed is opened, and its kind."""
    _, name, door = drawn(seed)
    return f"{door} {name}"


def settings_of(run, *, stage=2, texts=(), **changed):
    """The settings of a short run, which continues what is there."""
    engine = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "gradient_clipping": "auto",
    }
    (Runs.bases / "engine.json").write_text(json.dumps(engine))
    flags = {
        "train.method": "bco",  # which remembers, and so has more in its checkpoints
        "train.cache": str(Runs.bases / "pairs"),
        "train.output": str(run),
        "train.resume": "auto",
        "train.deepspeed": str(Runs.bases / "engine.json"),
    }
    values = {**SETTINGS, **changed}
    if texts:
        flags, values = {**flags, **values}, list(texts)
    return load_settings(flags, values, file=None, command="sweep" if texts else "train")


def train(run, *, callbacks=(), **changed):
    """What a training leaves, as far as it owes nothing to the machine."""
    job = open_training(settings_of(run, **changed))
    trained = run_training(replace(job, callbacks=callbacks), progress=NoProgress())
    return trained.text(), made(run)


def made(run):
    """The trained weights and every line of the metrics."""
    tensors = load_file(run / "model" / "model.safetensors")
    weights = {name: (str(one.dtype), one.tolist()) for name, one in tensors.items()}
    return weights, learned(run) if (run / "metrics.jsonl").exists() else []


def begun(run):
    """A training of another run, from the model of this one."""
    other = run.with_name("other")
    policy = {"train.model": str(run / "model"), "train.other_reference": True}
    return train(other, **policy, **{"train.max_steps": 1})[1]


def swept(run):
    """A sweep of which this run is the only one."""
    (trial,) = trials_of(["bco"], {})
    folder = run.with_name("sweep")
    OutputFolder(folder, "sweep").prepare()
    run.rename(folder / trial.name)
    load = lambda texts: settings_of(folder / trial.name, texts=texts)  # noqa: E731
    result = sweep(load, [trial], str(folder), progress=NoProgress())
    if result.failures:
        raise result.failures[0].error
    return result.text(), (folder / "sweep.html").read_text()


def reported(run):
    """The page of a run."""
    return write_report(run).read_text()


def loaded(run):
    """A run as Python has it."""
    found = load_run(run)
    frames = (found.metrics, found.evaluations, found.samples)
    rows = [frame.to_dicts() for frame in frames]
    return found.ending, found.steps, bool(found.model), found.settings, rows


OPENED = {
    "resume": train,
    "resized": partial(train, stage=0),
    "again": lambda run: train(run)[0],
    "longer": partial(train, **{"train.max_steps": 8}),
    "sweep": swept,
    "policy": begun,
    "report": reported,
    "load": loaded,
}
CONTINUED = ("resume", "resized", "longer")
TRAINED = (*CONTINUED, "policy")


class Runs:
    """The undamaged runs, and what comes of them."""

    @classmethod
    def prepare(cls, folder):
        """Made once in a process."""
        for name in ("bases", "case"):
            shutil.rmtree(folder / name, ignore_errors=True)
        os.environ["ALIGN_HOME"] = str(folder / "home")
        cls.folder, cls.bases, cls.whole = folder, folder / "bases", {}
        cls.bases.mkdir(parents=True)
        make_pairs(cls.bases, make_tokenizer(cls.bases / "tokenizer"), rows=16, pretrain_steps=0)
        scored(cls.bases, "pairs", kl_pairs=1)
        cls.watch = Watch(folder)

    @classmethod
    def base(cls, name):
        """A run that is finished, or was broken off in its fifth step; made when it is needed."""
        base, run = cls.bases / name, cls.folder / "case" / "run"
        if not base.exists():
            shutil.rmtree(run.parent, ignore_errors=True)
            run.parent.mkdir()
            try:
                train(run, callbacks=(breaking,) if name == PAUSED else ())
                assert name == FINISHED
            except UsageError:
                assert name == PAUSED
            ledger = {"address": "", "experiment": "align", "run_name": "kto"}
            open_ledger(kind_of(MAIN), RunFolder(run), **ledger)
            note_fitting(RunFolder(run), TOKENS, TOKENS - 1)
            run.rename(base)
        return base

    @classmethod
    def of_whole(cls, name, door):
        """What a door makes of an undamaged copy."""
        if (name, door) not in cls.whole:
            cls.whole[name, door] = OPENED[door](cls.copy(name))
        return cls.whole[name, door]

    @classmethod
    def copy(cls, name):
        """A fresh copy, always under the same path."""
        base = cls.base(name)
        shutil.rmtree(cls.folder / "case", ignore_errors=True)
        return Path(shutil.copytree(base, cls.folder / "case" / "run"))


def breaking(step, metrics):
    """Ends a run after a step of which there is no checkpoint."""
    if step == 5:
        raise UsageError("no more")


def case(seed, folder):
    """Opens a damaged run."""
    draw, name, door = drawn(seed)
    whole = Runs.of_whole(name, door)
    run = Runs.copy(name)
    done = damaged_runs.damage(run, draw, is_continued=door in CONTINUED)
    outside = run.with_name("outside")
    before = contents_of(outside)
    with Runs.watch:
        judge = partial(judged, whole, door, done)
        end = tried(lambda: OPENED[door](run), done.files, judge)
    if Runs.watch.seen:
        end = replace(end, outcome="wrong", detail=f"it did {Runs.watch.seen[:2]}")
    if contents_of(outside) != before:
        end = replace(end, outcome="wrong", detail="what a link named was changed")
    return replace(end, detail=f"{done.what}: {end.detail}"[:900])


def contents_of(path):
    """What a link of the run leads to."""
    return path.read_bytes() if path.is_file() else contents(path)


def judged(whole, door, done, found):
    """Whether what came of a run is that of the whole folder, or fits what was signed."""
    if found == whole:
        return End("same")
    if door not in TRAINED:
        said = str(found)
        if done.is_signed or done.is_lost or any(name in said for name in done.files):
            return End("changed")
        return End("wrong", f"{first_difference(said, str(whole))}")
    weights, lines = found[-1] if door != "policy" else found
    known, all_lines = whole[-1] if door != "policy" else whole
    # A longer run that begins anew has its lines at other steps.
    if weights == known and (door == "longer" or lines == all_lines[len(all_lines) - len(lines) :]):
        return End("changed", "only what was lost is missing")
    if door == "resized" and not done.is_signed and are_near((weights, lines), (known, all_lines)):
        return End("changed", "an earlier checkpoint, rounded elsewhere")
    if not (done.is_signed or door == "policy"):
        return End("wrong", "other weights" if weights != known else "other metrics")
    if done.is_impossible:
        return End("wrong", "it is used")
    if fault := fault_of(weights, known, lines):
        return End("wrong", fault)
    return End("changed")


def first_difference(one, other):
    """Where two texts part."""
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return f"{one[max(0, at - 40) : at + 80]!r} and not {other[max(0, at - 40) : at + 80]!r}"


def are_near(found, whole):
    """Whether all numbers are the same but for their last digits."""
    if isinstance(found, dict):
        return found.keys() == whole.keys() and all(
            are_near(found[key], whole[key]) for key in found
        )
    if isinstance(found, list | tuple):
        return len(found) == len(whole) and all(map(are_near, found, whole))
    if isinstance(found, float):
        return math.isclose(found, whole, rel_tol=1e-3, abs_tol=1e-5)
    return found == whole


def fault_of(weights, known, lines):
    """What no training leaves."""
    shapes = {name: (kind, len(flat(one))) for name, (kind, one) in weights.items()}
    if shapes != {name: (kind, len(flat(one))) for name, (kind, one) in known.items()}:
        return "weights of other shapes"
    if not all(map(math.isfinite, (x for _, one in weights.values() for x in flat(one)))):
        return "weights that are not finite"
    steps = [line["step"] for line in lines]
    return "" if steps == sorted(steps) else f"steps {steps}"


def flat(values):
    """Nested lists of numbers as one list."""
    if not isinstance(values, list):
        return [values]
    return [x for one in values for x in flat(one)]


def without_digests():
    """Leaves out that a file of a checkpoint has to have the digest in its record."""
    from align.stages.storage.run import checkpoints  # noqa: PLC0415

    checkpoints._fault_of = lambda *arguments: ""


PLANTS = {"digests": without_digests}
CAMPAIGN = Campaign(__file__, name_of, case, Runs.prepare, PLANTS)

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
