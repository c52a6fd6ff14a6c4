"""The trained model as a folder others can load, written beside its place and then renamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..stages.engine.peers import from_first
from ..stages.model.save import save_adapter, save_merged, save_whole
from ..stages.report.card import Lineage, model_card
from ..stages.storage.final_model import save_model
from .run_identity import versions
from .settings import flatten, redacted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .run_records import RunRecords
    from .run_start import Start
    from .session import Session


def write_model(session: Session, start: Start, records: RunRecords, *, steps: int) -> None:
    """All ranks give their part of the weights; the first writes `model/`."""
    is_adapter = session.job.config.lora.enabled
    weights = session.engine.weights(trainable_only=is_adapter)
    lineage = _lineage(session, records, steps)
    from_first(session.world, lambda: _write(session, start, lineage, weights))


def _write(session: Session, start: Start, lineage: Lineage, weights: Mapping[str, Tensor]) -> None:
    job, folder = session.job, start.folder
    lora, source = job.config.lora, Path(job.policy.path)

    def write(draft: Path) -> None:
        save = save_adapter if lora.enabled else save_whole
        save(session.policy.model, weights, source, draft)
        _write_card(draft, model_card(lineage, adapter_of=job.policy.path if lora.enabled else ""))
        if lora.enabled and lora.merge:
            save_model(folder.merged, lambda merged: write_merged(draft, merged), start.run_id)

    def write_merged(adapter: Path, draft: Path) -> None:
        save_merged(job.policy, adapter, draft)
        _write_card(draft, model_card(lineage))

    save_model(folder.model, write, start.run_id)


def _write_card(folder: Path, card: str) -> None:
    (folder / "README.md").write_text(card, encoding="utf-8")


def _lineage(session: Session, records: RunRecords, steps: int) -> Lineage:
    job = session.job
    manifest, settings = job.manifest, flatten(job.config)
    sections = {"train"} | ({"lora"} if job.config.lora.enabled else set())
    return Lineage(
        method=session.recipe.name,
        formula=session.recipe.formula,
        options={name: str(value) for name, value in session.recipe.values.items()},
        settings={
            name: str(redacted(value))
            for name, value in settings.items()
            if name.partition(".")[0] in sections
        },
        policy=job.policy.path,
        reference=manifest.model,
        reference_weights=manifest.fingerprint["model.weights"],
        cache=str(job.cache.root),
        cache_root=manifest.root,
        data={entry.name: entry.sha256 for entry in manifest.inputs},
        steps=steps,
        rows=session.source.train_rows,
        metrics=records.metrics,
        versions=versions(),
        mlflow_run=records.mlflow_run_id,
    )
