"""`report.html`: a run on one page, made of what lies in its folder and of its cache's manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schemas.errors import CorruptionError, UsageError
from ..stages.report.charts import plain
from ..stages.report.curves import further_curves, learning_curves
from ..stages.report.distributions import spread_charts
from ..stages.report.evaluation_table import read_evaluation
from ..stages.report.page import facts, grid, page, section, tiles
from ..stages.storage import fs
from ..stages.storage.layout import CacheFolder
from ..stages.storage.manifest import load_manifest
from ..stages.storage.run_folder import RunFolder
from ..stages.tracking.names import EVAL
from .journal import History, history_of
from .settings import read_yaml, redacted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..schemas.manifest import Manifest
    from .measured import Measured

HEADLINES = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "log_odds/accuracy": "log-odds accuracy",
}
MEASURED_ON = {"held out": "held-out rows", "training": "first and last step"}
KEPT_APART = "Rows that nothing was learned from. A log-ratio is log(policy / reference), summed."


def write_report(root: Path) -> Path:
    """Makes the page of a run, whether or not it is over; returns where it lies."""
    folder = RunFolder(root)
    if not (folder.metrics.exists() and folder.config.exists()):
        raise UsageError(
            f"{root} holds no training run: it lacks {folder.metrics.name} or "
            f"{folder.config.name}. Name the --output of `align train`."
        )
    fs.publish(folder.report, _page(folder).encode(), label="report")
    return folder.report


def _page(folder: RunFolder) -> str:
    history, settings = history_of(folder.metrics), read_yaml(folder.config)
    further = grid(further_curves(history.learned, history.held_out))
    return page(
        folder.root.resolve().name,
        list(_sentences(folder, history, settings["train.method"])),
        tiles(dict(_headlines(history.measured))),
        section("Learning", grid(learning_curves(history.learned, history.held_out))),
        section("Held-out completions", grid(_spreads(folder)), note=KEPT_APART),
        *_of_cache(settings),
        section("Settings", facts(_shown(settings)), is_folded=True),
        section("Speed, memory and more", further, is_folded=True),
    )


def _sentences(folder: RunFolder, history: History, method: str) -> Iterator[str]:
    ending = "finished" if folder.model.exists() else "not finished"
    yield f"{method}, {history.steps:,} steps, {ending}."
    if steps := _not_applied(folder):
        shown = ", ".join(f"{step:,}" for step in steps[:10])
        more = f" and {len(steps) - 10:,} more" if len(steps) > 10 else ""
        yield f"NaN or infinity: steps {shown}{more} were not applied (nonfinite.jsonl)."


def _not_applied(folder: RunFolder) -> list[int]:
    if not folder.nonfinite.exists():
        return []
    lines = fs.read_bytes(folder.nonfinite).splitlines()
    return sorted({int(json.loads(line)["step"]) for line in lines})


def _headlines(measured: Measured) -> Iterator[tuple[str, str]]:
    prefix = EVAL if measured.rows == "held out" else ""
    for name, said in HEADLINES.items():
        before, after = (one.get(f"{prefix}{name}") for one in (measured.before, measured.after))
        if before is not None:
            came_to = "" if after is None else f" → {plain(after)}"
            yield f"{said}, {MEASURED_ON[measured.rows]}", f"{plain(before)}{came_to}"


def _spreads(folder: RunFolder) -> str:
    if not (paths := folder.evaluations()):
        return ""
    last = read_evaluation(paths[-1])
    return spread_charts(read_evaluation(paths[0]) if len(paths) > 1 else last, last)


def _of_cache(settings: dict[str, Any]) -> list[str]:
    """Where the numbers of the reference come from, as far as the cache still tells."""
    cache = CacheFolder(Path(settings["train.cache"] or settings["cache.output"]))
    try:
        manifest = load_manifest(cache)
    except (UsageError, CorruptionError) as error:
        return [section("Data", facts({"cache": str(error)}))]
    return [
        section("Data", facts(_data(manifest))),
        section("Lineage", facts(_lineage(cache, manifest, settings))),
        section("What the cache hangs on", facts(manifest.fingerprint), is_folded=True),
    ]


def _data(manifest: Manifest) -> dict[str, str]:
    files = {entry.name: f"{entry.rows:,} rows, sha256 {entry.sha256}" for entry in manifest.inputs}
    dropped = {f"left out: {why}": f"{rows:,} rows" for why, rows in manifest.quarantined.items()}
    notes = {f"counted: {what}": f"{number:,}" for what, number in manifest.notes.items()}
    kept = f"{manifest.rows:,} rows of {manifest.rows_in:,} read, {manifest.branches:,} completions"
    return {**files, "in the cache": kept, **dropped, **notes}


def _lineage(cache: CacheFolder, manifest: Manifest, settings: dict[str, Any]) -> dict[str, str]:
    began = settings["train.model"] or f"{manifest.model}, the reference"
    adapter = {"its adapter": manifest.adapter} if manifest.adapter else {}
    return {
        "policy began as": began,
        "reference": manifest.model,
        **adapter,
        "cache": str(cache.root),
        "cache root": manifest.root,
        "reference weights": manifest.fingerprint["model.weights"],
    }


def _shown(settings: dict[str, Any]) -> dict[str, str]:
    sections = ("train", "method", "lora", "model")
    return {
        name: str(redacted(value))
        for name, value in settings.items()
        if name.partition(".")[0] in sections
    }
