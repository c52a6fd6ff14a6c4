"""Uploads a run whose output is in an object store, however it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.batches import World
from ...schemas.errors import UsageError, log_failure
from ...stages.engine.distributed import gathered
from ...stages.storage.run.run_store import RunStore


@contextmanager
def uploaded(store: RunStore | None) -> Iterator[None]:
    """Uploads what the run leaves, however it ends; a failure to do so does not hide another."""
    try:
        yield
    except BaseException:
        if store:
            with log_failure("Not all of the run was uploaded"):
                store.push()
        raise
    if store:
        store.push()


def require_one_machine(world: World, store: RunStore) -> None:
    """Refuses ranks on several machines: they write one checkpoint together, in one folder."""
    machines = set(gathered(world, socket.gethostname()))
    if len(machines) > 1:
        raise UsageError(
            f"{store.root}: the ranks are on {len(machines)} machines, and checkpoints need a "
            "folder that all of them share. Choose an --output there, and upload it afterwards."
        )
