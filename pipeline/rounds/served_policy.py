"""The policy of a round behind a server of our own, which starts once a sample is missing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ...schemas.config import Config
from ...schemas.round_options import ServerOptions
from ...schemas.samples import SERVER, OpenSampler, Sampler, Sampling
from ...stages.server.own_server import own_server
from ...stages.tracking.progress import Progress
from ..tables.samplers import sampler_of
from .rounds_checks import digest_of_model


@dataclass(frozen=True)
class ServedPolicy(Sampler):
    """A policy that is known by its digest, wherever it is; its server ends with the stack."""

    config: Config
    server: ServerOptions  # for its concurrency and timeouts
    log: Path
    stack: ExitStack
    progress: Progress
    device = SERVER

    def identity(self) -> Mapping[str, str]:
        """The digest of the policy."""
        return {"served_model": digest_of_model(self.config.model)}

    def open(self, sampling: Sampling) -> OpenSampler:
        """Starts the server."""
        model, rounds = self.config.model, self.config.rounds
        self.progress.log(f"serving {model.path}; its output is in {self.log}")
        url = self.stack.enter_context(
            own_server(rounds.serve, model.path, log=self.log, timeout=rounds.serve_timeout)
        )
        server = replace(
            self.server,
            url=url,
            model=str(Path(model.path).resolve()),
            revision=digest_of_model(model),
            key_variable="",  # the key is the judge's
            max_tokens=0,
        )
        return sampler_of(model, self.config.tokens, server, self.config.scoring).open(sampling)
