"""A very small model, caches of its log-probs, and trainings on them."""

from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from align.pipeline.options.settings import Settings
from align.pipeline.precompute.precompute import precompute
from align.pipeline.train.load import identify, load
from align.pipeline.train.setup import check
from align.pipeline.train.train import learn as learn_steps
from align.pipeline.train.train import train_in
from align.schemas.batches import World
from align.schemas.checkpoint import State
from align.schemas.config import CacheOptions, Config, ModelOptions, TrackingOptions
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.demo.preferences import draw_preferences, paired, unpaired
from align.stages.demo.tiny_world import ModelShape, make_model
from align.stages.engine.distributed import joined_world
from align.stages.model.reference import HfReference
from align.stages.train.together import StopConditions
from support.stage_one import Silent

SHAPE = ModelShape(hidden_size=32, layers=2, heads=2, key_value_heads=1, intermediate_size=48)
ROWS = 54
START = State()
ALONE = World(0, 1, 0)
# Metrics that depend on the machine, or on how a step was cut.
MACHINE = ("speed/", "memory/", "padding")


@dataclass(frozen=True)
class TrainingWorld:
    """The folders of an untrained model, and of caches of its log-probs."""

    folder: Path

    @property
    def model(self):
        return self.folder / "model"

    @property
    def pairs(self):
        """Two mismatched partners of each completion."""
        return self.folder / "pairs"

    @property
    def labels(self):
        """One completion for each prompt: first all good ones, then all bad ones."""
        return self.folder / "labels"

    @property
    def everything(self):
        """Pairs with scores, margins, weights, and the log-prob of every token."""
        return self.folder / "everything"


def make_training_world(folder, tokenizer):
    """Makes the model, the data and the caches."""
    preferences = make_pairs(
        folder, AutoTokenizer.from_pretrained(tokenizer), rows=ROWS, pretrain_steps=0
    )
    both = unpaired(preferences)
    one_each = pa.concat_tables([both.slice(0, ROWS)[0::2], both.slice(ROWS)[1::2]])
    pq.write_table(one_each, folder / "labels.parquet")
    pq.write_table(with_numbers(paired(preferences)), folder / "everything.parquet")
    scored(folder, "pairs", kl_pairs=2)
    scored(folder, "labels", kl_pairs=1)
    scored(folder, "everything", kl_pairs=1, token_logps=True)


def with_numbers(pairs):
    """Adds every numeric column that pairs may have."""
    drawn = np.random.default_rng(0).normal(size=(4, len(pairs)))
    columns = {
        "chosen_score": 1 + drawn[0],
        "rejected_score": drawn[1],
        "margin": 0.1 * abs(drawn[2]),
        "weight": 1 + abs(drawn[3]),
    }
    for name, values in columns.items():
        pairs = pairs.append_column(name, pa.array(values))
    return pairs


def make_pairs(folder, tokenizer, *, rows, pretrain_steps):
    """Makes a model and a file of pairs; returns the preferences in it."""
    make_model(folder / "model", tokenizer, shape=SHAPE, pretrain_steps=pretrain_steps)
    preferences = list(draw_preferences(rows, seed=1))
    pq.write_table(paired(preferences), folder / "pairs.parquet")
    return preferences


def scored(
    folder, name, *, kl_pairs, token_logps=False, output="", model=None, adapter="", **tokens
):
    """Runs stage 1 over one file of the folder; returns the cache."""
    made = folder / (output or name)
    config = Config(
        model=ModelOptions(path=str(model or folder / "model"), device="cpu", adapter=str(adapter)),
        data=DataOptions(files=[str(folder / f"{name}.parquet")]),
        tokens=TokenOptions(max_length=512, **tokens),
        cache=CacheOptions(
            output=str(made),
            shards=8,
            kl_pairs=kl_pairs,
            token_logps=token_logps,
            reuse_known=False,
        ),
        tracking=TrackingOptions(mlflow=False),
    )
    reference = HfReference(config.model)
    precompute(config, reference, progress=Silent())
    return made


def job_of(cache, method, *, options=None, lora=None, device="cpu", **settings):
    """A checked run, not started, in float32 and without MLflow."""
    plain = {"batch_size": 8, "epochs": 2, "lr": 1e-3, "dtype": "float32", "deepspeed": "zero0"}
    config = Config(
        model=ModelOptions(device=device),
        train=TrainOptions(method=method, cache=str(cache), **(plain | settings)),
        lora=lora or LoraOptions(),
        tracking=TrackingOptions(mlflow=False),
        method=options or {},
    )
    run = check(Settings(config, {}))
    identify(run, ALONE)
    return run


def session_of(job, world):
    """The run on a rank, with its data and its policy loaded; its records are kept."""
    run = copy(job)
    run.world, run.records = world, Recorded()
    load(run, Silent())
    return run


def trained(job, progress=None):
    """Trains as `align train` does, in this process alone."""
    run = copy(job)
    with joined_world() as run.world:
        return train_in(run, progress or Silent())


@dataclass
class Recorded:
    """Keeps everything that the loop records."""

    steps: list = field(default_factory=list)  # (step, metrics)
    evaluations: list = field(default_factory=list)  # (step, metrics)
    samples: list = field(default_factory=list)  # of each of them, its single completions
    refused: list = field(default_factory=list)  # (step, row ids)
    margins: list = field(default_factory=list)  # (step, epoch, RowMargins)
    saves: list = field(default_factory=list)  # steps
    shrunk: list = field(default_factory=list)  # (step, tokens per batch from then on)
    on_step: object = None

    def stepped(self, place, metrics, line):
        if line is not None:
            self.steps.append((place.step, line))
        if self.on_step:
            self.on_step(place)

    def evaluated(self, place, metrics, samples):
        self.evaluations.append((place.step, metrics))
        self.samples.append(samples)

    def ran_out(self, step, tokens):
        self.shrunk.append((step, tokens))

    def not_applied(self, step, row_ids):
        self.refused.append((step, row_ids))

    def log_margins(self, step, epoch, rows):
        self.margins.append((step, epoch, rows))

    def save(self, place):
        if self.saves[-1:] != [place.step]:
            self.saves.append(place.step)


def through(run, start=START, *, recorded=None, stop=None):
    """Takes a run's steps; returns the records, the last state and the reason of the end."""
    run.records, run.stop = recorded or Recorded(), stop or StopConditions()
    return run.records, *learn_steps(run, start)


def learn(job, world):
    """Trains as `align train` does, but writes nothing."""
    run = session_of(job, world)
    return run, through(run)[0]


def facts(metrics):
    """The metrics that do not depend on the machine."""
    return {name: value for name, value in metrics.items() if not name.startswith(MACHINE)}
