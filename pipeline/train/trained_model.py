"""Writes the trained model as a folder others can load, in a draft that is then renamed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...schemas.cache import Stops
from ...schemas.checkpoint import Checkpoint, State
from ...schemas.errors import CorruptionError, NonFiniteError, UsageError
from ...stages.engine.deepspeed_state import is_finite
from ...stages.engine.distributed import run_on_rank_zero
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
from .checkpoint import require_space_for_model
from .records import used_settings
from .resume import damage_on_ranks, versions

if TYPE_CHECKING:
    from .setup import Run


def state_to_write(run: Run, state: State) -> State:
    """The state whose model is written: the last, or with `train.write_best` the best saved one.

    The latter is loaded into the engine; the checkpoint of the last step stays the newest.
    """
    train, folder = run.config.train, run.folder
    if not train.write_best:
        return state
    name = wanted(train.best).metric
    found = run_on_rank_zero(run.world, lambda: _best_of(folder, train.best))
    if found is None:
        raise UsageError(
            f"train.write_best: no checkpoint has {name}, so none is the best. Write the model of "
            "the last step: the same command with --set train.write_best=false --resume auto."
        )
    best = found.state
    if why := damage_on_ranks(run.world, folder.step(best.step), found):
        raise _unusable(CHECKPOINTS.damaged(folder.step(best.step), why))
    if best.step != state.step:
        run.engine.load_state(folder.step(best.step))
    said = f"the model is that of step {best.step:,}, whose checkpoint has the best {name}"
    run.records.say(said)
    known = state.best
    if known and known.metric == train.best and known.value is not None:
        values = {best.step: best.metrics[name], known.step: known.value}
        if best_first(values, train.best)[0] != best.step:  # as before the first step
            run.records.say(f"step {known.step:,} has a better one, and no checkpoint")
    return best


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


def write_model(run: Run, state: State) -> None:
    """Gathers the weights of all ranks; rank zero writes `model/`."""
    weights = run.engine.weights(trainable_only=run.config.lora.enabled)
    lineage = _lineage(run, state)
    run_on_rank_zero(run.world, lambda: _write(run, lineage, weights))


def _write(run: Run, lineage: Lineage, weights: Mapping[str, Tensor]) -> None:
    lora, source, folder = run.config.lora, Path(run.begins_as.path), run.folder
    require_space_for_model(run)
    # A training whose last steps have left no numbers is not finished.
    fixed = {name for name, one in run.policy.model.named_parameters() if not one.requires_grad}
    for name in weights.keys() - fixed:
        if not is_finite(weights[name]):
            raise NonFiniteError(
                f"{folder.root}: {name} has weights that are NaN or infinite after the last step, "
                "so no model is written. Lower train.lr, or use --dtype float32, and begin anew."
            )
    stops = Stops.of(run.manifest.fingerprint).of_template
    own, value_head = parted(weights)
    merges = lora.enabled and lora.merge
    if not merges:  # one that was merged before would be taken for this model
        remove_model(folder.merged)

    def write(draft: Path) -> None:
        save = save_adapter if lora.enabled else save_whole
        save(run.policy.model, own, source, draft)
        finish(draft, model_card(lineage, adapter_of=lineage.policy if lora.enabled else ""))
        if merges:
            save_model(folder.merged, lambda merged: write_merged(draft, merged), run.run_id)

    def write_merged(adapter: Path, draft: Path) -> None:
        save_merged(run.begins_as, adapter, draft, scores=lineage.head == "score")
        finish(draft, model_card(lineage))

    def finish(draft: Path, card: str) -> None:
        if value_head:
            save_value_head(value_head, draft)
        if lineage.head != "score":
            stop_generation_at(stops, source, draft)
        (draft / "README.md").write_text(card, encoding="utf-8")

    save_model(folder.model, write, run.run_id)


def _lineage(run: Run, state: State) -> Lineage:
    manifest = run.manifest
    of_text = causal_model(run.policy.model).config.get_text_config(decoder=True)
    stops = Stops.of(manifest.fingerprint)
    ended = {"a turn": stops.turn, "a call of tools": stops.tool_calls, "plain text": stops.text}
    return Lineage(
        method=run.recipe.name,
        formula=run.recipe.formula,
        head=run.recipe.head,
        padding_token=getattr(of_text, "pad_token_id", None),
        options={name: str(value) for name, value in run.recipe.values.items()},
        stops={f"{what} ends with": stop.description for what, stop in ended.items() if stop},
        settings=used_settings(run, "train"),
        policy=origin_of(run.begins_as.path),
        reference=manifest.model,
        reference_weights=manifest.fingerprint["model.weights"],
        cache=origin_of(str(run.cache.root)),
        cache_root=manifest.root,
        data={entry.name: entry.sha256 for entry in manifest.inputs},
        steps=state.step,
        rows_seen=run.feed.rows_seen(state.step),
        rows=run.source.train_rows,
        metrics=state.metrics,
        versions=versions(),
        recorded=run.records.origins(),
    )
