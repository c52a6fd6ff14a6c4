"""Writes the trained model as a folder others can load, in a draft that is then renamed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ...schemas.cache import Manifest, Stops
from ...schemas.errors import NonFiniteError
from ...stages.engine.distributed import run_on_rank_zero
from ...stages.engine.partitions import is_finite
from ...stages.model.logprobs import causal_model
from ...stages.model.save import (
    parted,
    save_adapter,
    save_merged,
    save_value_head,
    save_whole,
    stop_generation_at,
)
from ...stages.report.model_card import Lineage, model_card
from ...stages.storage.bucket.local_copies import origin_of
from ...stages.storage.run.run_folder import RunFolder, save_model
from .checkpointer import require_space_for_model
from .resume import Start, versions
from .run_recorder import RunRecords, used_settings
from .training_job import Session


def write_model(session: Session, start: Start, records: RunRecords, *, steps: int) -> None:
    """Gathers the weights of all ranks; rank zero writes `model/`."""
    is_adapter = session.job.config.lora.enabled
    weights = session.engine.weights(trainable_only=is_adapter)
    lineage = _lineage(session, records, steps)
    run_on_rank_zero(session.world, lambda: _write(session, start, lineage, weights))


def _require_finite(session: Session, folder: RunFolder, weights: Mapping[str, Tensor]) -> None:
    """Refuses to call a training finished whose last steps have left no numbers."""
    of_model = session.policy.model.named_parameters()
    fixed = {name for name, parameter in of_model if not parameter.requires_grad}
    for name in weights.keys() - fixed:
        if not is_finite(weights[name]):
            raise NonFiniteError(
                f"{folder.root}: {name} has weights that are NaN or infinite after the last step, "
                "so no model is written. Lower train.lr, or use --dtype float32, and begin anew."
            )


def _write(session: Session, start: Start, lineage: Lineage, weights: Mapping[str, Tensor]) -> None:
    job, folder = session.job, start.folder
    require_space_for_model(session, folder)
    _require_finite(session, folder, weights)
    lora, source = job.config.lora, Path(job.policy.path)
    stops = Stops.of(job.manifest.fingerprint).of_template
    own, value_head = parted(weights)

    def write(draft: Path) -> None:
        save = save_adapter if lora.enabled else save_whole
        save(session.policy.model, own, source, draft)
        finish(draft, model_card(lineage, adapter_of=lineage.policy if lora.enabled else ""))
        if lora.enabled and lora.merge:
            save_model(folder.merged, lambda merged: write_merged(draft, merged), start.run_id)

    def write_merged(adapter: Path, draft: Path) -> None:
        save_merged(job.policy, adapter, draft, scores=lineage.head == "score")
        finish(draft, model_card(lineage))

    def finish(draft: Path, card: str) -> None:
        if value_head:
            save_value_head(value_head, draft)
        if lineage.head != "score":
            stop_generation_at(stops, source, draft)
        (draft / "README.md").write_text(card, encoding="utf-8")

    save_model(folder.model, write, start.run_id)


def _lineage(session: Session, records: RunRecords, steps: int) -> Lineage:
    job = session.job
    manifest = job.manifest
    return Lineage(
        method=session.recipe.name,
        formula=session.recipe.formula,
        head=session.recipe.head,
        padding_token=causal_model(session.policy.model).config.pad_token_id,
        options={name: str(value) for name, value in session.recipe.values.items()},
        stops=_stops(manifest),
        settings=used_settings(session, "train"),
        policy=origin_of(job.policy.path),
        reference=manifest.model,
        reference_weights=manifest.fingerprint["model.weights"],
        cache=str(job.cache.root),
        cache_root=manifest.root,
        data={entry.name: entry.sha256 for entry in manifest.inputs},
        steps=steps,
        rows_seen=session.feed.rows_seen(steps),
        rows=session.source.train_rows,
        metrics=records.metrics,
        versions=versions(),
        recorded=records.origins(),
    )


def _stops(manifest: Manifest) -> dict[str, str]:
    stops = Stops.of(manifest.fingerprint)
    ended = {"a turn": stops.turn, "a call of tools": stops.tool_calls, "plain text": stops.text}
    return {f"{what} ends with": stop.description for what, stop in ended.items() if stop}
