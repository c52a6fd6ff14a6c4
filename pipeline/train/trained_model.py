"""Writes the trained model as a folder others can load, in a draft that is then renamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...schemas.cache import Manifest, Stops
from ...schemas.checkpoint import Checkpoint
from ...schemas.errors import CorruptionError, NonFiniteError, UsageError
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
from ...stages.storage.copies import origin_of
from ...stages.storage.run.checkpoints import CHECKPOINTS, best_checkpoint, best_first, wanted
from ...stages.storage.run.run_folder import RunFolder, remove_model, save_model
from .checkpointer import require_space_for_model
from .resume import Start, damage_on_ranks, versions
from .run_recorder import RunRecords, used_settings
from .training_job import Session

if TYPE_CHECKING:
    from ...stages.train.loop import TrainingPosition


@dataclass(frozen=True)
class ChosenModel:
    """The step whose model is written, and the metrics of that step."""

    step: int
    metrics: Mapping[str, float]


def chosen_model(
    session: Session, start: Start, records: RunRecords, position: TrainingPosition
) -> ChosenModel:
    """The model of the last step, or with `train.write_best` that of the best checkpoint.

    The latter is loaded into the engine; the checkpoint of the last step stays the newest.
    """
    train = session.job.config.train
    if not train.write_best:
        return ChosenModel(position.step, records.metrics)
    folder, name = start.folder, wanted(train.best).metric
    best = run_on_rank_zero(session.world, lambda: _best_of(folder, train.best))
    if best is None:
        raise UsageError(
            f"train.write_best: no checkpoint has {name}, so none is the best. Write the model of "
            "the last step: the same command with --set train.write_best=false --resume auto."
        )
    step, metrics = best.position.global_step, best.position.metrics
    if why := damage_on_ranks(session.world, folder.step(step), best):
        raise _unusable(CHECKPOINTS.damaged(folder.step(step), why))
    if step != position.step:
        session.engine.load_state(folder.step(step))
    records.say(f"the model is that of step {step:,}, whose checkpoint has the best {name}")
    known = position.best
    if known and known.metric == train.best and known.value is not None:
        values = {step: metrics[name], known.step: known.value}
        if best_first(values, train.best)[0] != step:  # as before the first step
            records.say(f"step {known.step:,} has a better one, and no checkpoint")
    return ChosenModel(step, metrics)


def _best_of(folder: RunFolder, best: str) -> Checkpoint | None:
    try:
        return best_checkpoint(folder, best)
    except CorruptionError as error:
        raise _unusable(error) from error


def _unusable(error: CorruptionError) -> CorruptionError:
    return CorruptionError(
        f"{error} train.write_best needs it, for it may be the best: remove or restore it, or "
        "give the same command with --set train.write_best=false --resume auto."
    )


def write_model(session: Session, start: Start, records: RunRecords, model: ChosenModel) -> None:
    """Gathers the weights of all ranks; rank zero writes `model/`."""
    is_adapter = session.job.config.lora.enabled
    weights = session.engine.weights(trainable_only=is_adapter)
    lineage = _lineage(session, records, model)
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
    merges = lora.enabled and lora.merge
    if not merges:  # one that was merged before would be taken for this model
        remove_model(folder.merged)

    def write(draft: Path) -> None:
        save = save_adapter if lora.enabled else save_whole
        save(session.policy.model, own, source, draft)
        finish(draft, model_card(lineage, adapter_of=lineage.policy if lora.enabled else ""))
        if merges:
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


def _lineage(session: Session, records: RunRecords, model: ChosenModel) -> Lineage:
    job = session.job
    manifest = job.manifest
    of_text = causal_model(session.policy.model).config.get_text_config(decoder=True)
    return Lineage(
        method=session.recipe.name,
        formula=session.recipe.formula,
        head=session.recipe.head,
        padding_token=getattr(of_text, "pad_token_id", None),
        options={name: str(value) for name, value in session.recipe.values.items()},
        stops=_stops(manifest),
        settings=used_settings(session, "train"),
        policy=origin_of(job.policy.path),
        reference=manifest.model,
        reference_weights=manifest.fingerprint["model.weights"],
        cache=origin_of(str(job.cache.root)),
        cache_root=manifest.root,
        data={entry.name: entry.sha256 for entry in manifest.inputs},
        steps=model.step,
        rows_seen=session.feed.rows_seen(model.step),
        rows=session.source.train_rows,
        metrics=dict(model.metrics),
        versions=versions(),
        recorded=records.origins(),
    )


def _stops(manifest: Manifest) -> dict[str, str]:
    stops = Stops.of(manifest.fingerprint)
    ended = {"a turn": stops.turn, "a call of tools": stops.tool_calls, "plain text": stops.text}
    return {f"{what} ends with": stop.description for what, stop in ended.items() if stop}
