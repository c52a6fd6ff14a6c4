"""The policy of a round behind rounds.serve; the server starts only if a sample is missing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ...schemas.config import Config
from ...schemas.round_options import ServerOptions
from ...schemas.samples import SERVER, OpenSampler, Sampler, Sampling
from ...stages.server.policy_server import policy_server
from ...stages.tracking.progress import Progress
from ..tables.samplers import sampler_of
from .rounds_checks import digest_of_model


@dataclass(frozen=True)
class ServedPolicy(Sampler):
    """A policy behind a server; samples are stored under the policy's digest."""

    config: Config
    server: ServerOptions  # gives concurrency and timeouts
    log: Path
    stack: ExitStack
    progress: Progress
    device = SERVER

    def identity(self) -> Mapping[str, str]:
        """The digest of the policy."""
        return {"served_model": digest_of_model(self.config.model)}

    def open(self, sampling: Sampling) -> OpenSampler:
        """Starts the server, which runs until the stack closes."""
        model, rounds = self.config.model, self.config.rounds
        self.progress.log(f"serving {model.path}; its output is in {self.log}")
        url = self.stack.enter_context(
            policy_server(rounds.serve, model.path, log=self.log, timeout=rounds.serve_timeout)
        )
        server = replace(
            self.server,
            url=url,
            model=str(Path(model.path).resolve()),
            revision=digest_of_model(model),
            key_variable="",  # the key in the settings is the judge's
            max_tokens=0,  # a server of this machine costs nothing
        )
        return sampler_of(replace(self.config, server=server)).open(sampling)
