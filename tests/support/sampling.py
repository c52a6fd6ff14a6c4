"""Sampling without a model; every draw is counted."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from align.pipeline.tables.sample import sample
from align.schemas.config import Config, TrackingOptions
from align.schemas.data_options import DataOptions
from align.schemas.round_options import SampleOptions
from align.schemas.samples import Refused, Sample, Sampler
from support.stage_one import Silent

BATCH = 5


@dataclass(frozen=True)
class CountingSampler(Sampler):
    """Writes down each sample that it draws, as one who is paid for it would."""

    log: Path
    name: str = "stub"
    refuses: str = ""  # prompts with this text

    device = "cpu"

    def identity(self):
        """Its name."""
        return {"model": self.name}

    def open(self, sampling):
        """Notes that it was opened."""
        self._note("opened")
        return OpenCounting(self, sampling)

    def _note(self, line):
        with self.log.open("a") as file:
            file.write(f"{line}\n")

    def draw(self, key, number, sampling):
        """One sample, by a hash of what it is asked for."""
        self._note(f"{key} {number}")
        drawn = hashlib.sha256(f"{self.name} {sampling} {number} {key}".encode()).hexdigest()
        text = drawn[: int(drawn[0], 16)]
        return Sample(key, number, text, "stop" if drawn[1] > "4" else "length", 7, len(text) + 1)

    def lines(self):
        """All that was written down."""
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []

    def drawn(self):
        """The samples among it."""
        return [line for line in self.lines() if line != "opened"]


@dataclass(frozen=True)
class OpenCounting:
    """Draws batch by batch."""

    sampler: CountingSampler
    sampling: object

    def sample(self, wanted):
        """Yields batches of the samples, those of refused prompts first."""
        refuses, rows, refused = self.sampler.refuses, [], []
        for one in wanted:
            if refuses and refuses in one.prompt.text:
                refused += [Refused(one.prompt.key, number, "no") for number in one.numbers]
            else:
                rows += [(one.prompt.key, number) for number in one.numbers]
        if refused:
            yield refused
        for start in range(0, len(rows), BATCH):
            yield [
                self.sampler.draw(key, number, self.sampling)
                for key, number in rows[start : start + BATCH]
            ]


def write_prompts(path, texts, **columns):
    """A file of prompts, with what goes with them."""
    rows = [
        {"prompt": text, **{name: values[at] for name, values in columns.items()}}
        for at, text in enumerate(texts)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def config_of(prompts, output, **options):
    """The settings of a run that records nothing."""
    return Config(
        data=DataOptions(files=[str(prompts)]),
        sample=SampleOptions(output=str(output), **{"n": 4, **options}),
        tracking=TrackingOptions(mlflow=False),
    )


def run_sampling(config, sampler, *, part=None):
    """Samples in this process."""
    return sample(config, progress=Silent(), part=part, sampler=sampler)
