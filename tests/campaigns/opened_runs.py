"""Runs that are broken off or finished, and what opens them, as the commands do."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from campaigns.watched import Undamaged
from safetensors.torch import load_file

from align.pipeline.commands.python_api import load_run
from align.pipeline.options.settings import load_settings
from align.pipeline.train.run_diff import diff_runs
from align.pipeline.train.run_report import write_report
from align.pipeline.train.sweep import sweep
from align.pipeline.train.train import run_training
from align.pipeline.train.training_job import open_training
from align.pipeline.train.trials import trials_of
from align.schemas.errors import UsageError
from align.stages.demo.tiny_tokenizer import make_tokenizer
from align.stages.storage.cache.cache_folder import OutputFolder
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.outbox import open_ledger
from align.stages.tracking.progress import NoProgress
from align.stages.tracking.tracker import MAIN, kind_of
from support.stage_one import contents
from support.training_world import make_pairs, scored
from support.trainings import learned

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


def train(run, **changed):
    """What a training says and leaves, as far as that owes nothing to the machine."""
    return told(run, **changed), made(run)


def told(run, *, callbacks=(), **changed):
    """What a training says in the end."""
    job = open_training(settings_of(run, **changed))
    trained = run_training(replace(job, callbacks=callbacks), progress=NoProgress())
    return trained.text()


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
    write_report(run)
    return RunFolder(run).report.read_text()


def compared(run):
    """A run beside the whole one."""
    return diff_runs(run, Runs.bases / FINISHED).text()


def loaded(run):
    """A run as Python has it."""
    found = load_run(run)
    frames = (found.metrics, found.evaluations, found.samples)
    rows = [frame.to_dicts() for frame in frames]
    return found.ending, found.steps, bool(found.model), found.settings, rows


OPENED = {
    "resume": train,
    "resized": partial(train, stage=0),
    "again": told,
    "longer": partial(train, **{"train.max_steps": 8}),
    "sweep": swept,
    "policy": begun,
    "report": reported,
    "diff": compared,
    "load": loaded,
}


class Runs(Undamaged):
    """The undamaged runs, and what comes of them."""

    @classmethod
    def prepare(cls, folder):
        """Made once in a process."""
        cls.begin(folder)
        make_pairs(cls.bases, make_tokenizer(cls.bases / "tokenizer"), rows=16, pretrain_steps=0)
        scored(cls.bases, "pairs", kl_pairs=1)

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


def contents_of(path):
    """What a link of the run leads to."""
    return path.read_bytes() if path.is_file() else contents(path)
