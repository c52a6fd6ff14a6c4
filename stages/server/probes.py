"""Probe prompts, whose answers show that another model is served under the same name."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...schemas.errors import FingerprintError
from ...schemas.round_options import ServerOptions
from ...schemas.samples import Sampling
from .server_client import shortened

logger = logging.getLogger("align")

# Open questions: facts that every model knows, such as a capital, distinguish no two.
PROBES = (
    "Once upon a time",
    "Write a sentence about the sea.",
    "The most important thing to know about bread is",
    "Name an animal and say what it does at night.",
    "def solve(values):",
    "My advice for a long journey:",
)
PROBING = Sampling(temperature=0.0, max_new_tokens=16)


def require_same_probes(
    kept: Mapping[str, str], now: Mapping[str, str], options: ServerOptions
) -> None:
    """Refuses a model that answers most probes unlike the one whose answers are stored.

    Most, because few servers compute the same numbers in every batch: where two tokens are about
    equally likely, a greedy answer may change although the weights did not.
    """
    shared = [probe for probe in now if probe in kept]
    changed = [probe for probe in shared if kept[probe] != now[probe]]
    if not changed:
        return
    said = f"{len(changed)} of {len(shared)} probes are answered otherwise than before"
    if 2 * len(changed) > len(shared):
        first = changed[0]
        raise FingerprintError(
            f"{options.url}: {said}, so this is another model than the one whose answers are kept "
            f"under revision {options.revision!r}. To {first!r} it said "
            f"{shortened(kept[first])!r}, and says {shortened(now[first])!r}. Start the server "
            "with the same model, or state another server.revision."
        )
    logger.warning("%s: %s; a server may do that without another model.", options.url, said)
