"""What stage 1 has to say when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..stages.report.cache_tables import worded
from ..stages.storage.cache_folder import CacheFolder
from ..stages.storage.cleanup import superseded

if TYPE_CHECKING:
    from pathlib import Path

    from ..schemas.cache import Manifest
    from .units import Tally


@dataclass(frozen=True)
class Outcome:
    """A finished cache, and what this process did for it."""

    folder: Path
    manifest: Manifest
    tally: Tally
    was_complete: bool

    def text(self) -> str:
        """A few lines for a person."""
        manifest, tally = self.manifest, self.tally
        lines = [
            f"{self.folder}: {manifest.rows:,} rows, {manifest.branches:,} branches, "
            f"{manifest.tokens:,} completion tokens in {_shards(manifest)}",
            f"cache root {manifest.root}",
        ]
        if self.was_complete:
            lines.append("already complete: nothing was scored")
        else:
            lines.append(
                f"scored {tally.scored:,} branches, reused {tally.reused:,} of "
                f"{tally.scored + tally.reused:,}, in {tally.seconds:.1f} s"
            )
        dropped = [f"{count} {reason}" for reason, count in manifest.quarantined.items()]
        if dropped:
            total = sum(manifest.quarantined.values())
            lines.append(f"{total} of {manifest.rows_in:,} rows dropped: {', '.join(dropped)}")
        if kept := superseded(CacheFolder(self.folder), manifest):
            lines.append(f"note: {kept}")
        lines += [f"note: {count:,} {worded(name)}" for name, count in _notes(manifest)]
        return "\n".join(lines)


def _notes(manifest: Manifest) -> list[tuple[str, int]]:
    return sorted(manifest.notes.items())


def _shards(manifest: Manifest) -> str:
    count = len(manifest.shards)
    return f"{count:,} shard{'s' if count != 1 else ''}"
