"""Short rounds of an untrained model, and what they leave."""

import contextlib
import json
import weakref
from dataclasses import dataclass, field
from unittest import mock

import polars as pl
import yaml

from align.pipeline.tables.samplers import OpenLocalSampler
from align.schemas.samples import Sample
from support import letters

# Eight prompts of each round get three samples; a training takes two steps.
SHORT = {
    "cache": {"kl_pairs": 0},
    "sample": {"n": 3, "max_new_tokens": 8, "seed": 1},
    "judge": {"by": "function", "function": "support.letters:score"},
    "select": {"keep_cut": True},
    "train": {"method": "dpo", "lr": 0.05, "batch_size": 4, "max_steps": 2},
    "tracking": {"mlflow": False},
    "rounds": {"count": 2, "prompts_per_round": 8, "eval_fraction": 0.2, "output": "out"},
}


def write_settings(folder, world, **changes):
    """A rounds.yaml; `changes` are sections that differ from SHORT."""
    sections = {name: {**SHORT.get(name, {}), **changes.get(name, {})} for name in SHORT | changes}
    sections["model"] = {"path": str(world.model), **sections.get("model", {})}
    sections["data"] = {"files": [str(world.data.paired)], **sections.get("data", {})}
    path = folder / "rounds.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@dataclass
class Paid:
    """What was computed, as opposed to known."""

    sampled: list = field(default_factory=list)  # prompt and number
    judged: int = 0
    held: list = field(default_factory=list)  # how many engines, whenever it began to sample


@contextlib.contextmanager
def counted():
    """Counts what the sampler and the verifier compute meanwhile."""
    # Not with the other imports: it takes seconds.
    from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: PLC0415

    paid, sample, begin = Paid(), OpenLocalSampler.sample, DeepSpeedEngine.__init__
    engines = []

    def watched(engine, *arguments, **named):
        engines.append(weakref.ref(engine))
        begin(engine, *arguments, **named)

    def counting(sampler, wanted):
        paid.held.append(sum(one() is not None for one in engines))
        for group in sample(sampler, wanted):
            paid.sampled += [(one.prompt, one.number) for one in group if isinstance(one, Sample)]
            yield group

    before = len(letters.CALLS)
    with (
        mock.patch.object(OpenLocalSampler, "sample", counting),
        mock.patch.object(DeepSpeedEngine, "__init__", watched),
    ):
        yield paid
    paid.judged = len(letters.CALLS) - before


def lines_of(folder):
    """What rounds.jsonl says of each round; round 0 is the first model."""
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def damage(folder):
    """Takes away the line of the last round, and damages its samples; (file, bytes before) each."""
    last = lines_of(folder)[-1]["round"]
    rounds = folder / "rounds.jsonl"
    samples = folder / f"round-{last:03d}" / "samples" / "samples.parquet"
    lines, table = rounds.read_bytes(), samples.read_bytes()
    rounds.write_bytes(b"".join(lines.splitlines(keepends=True)[:-1]))
    samples.write_bytes(table[:60] + bytes([table[60] ^ 255]) + table[61:])
    return [(rounds, lines), (samples, table)]


def prompts_in(path):
    """The prompts of a table."""
    return set(pl.read_parquet(path)["prompt"])
