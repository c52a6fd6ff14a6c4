"""Writes the trained model as a folder that other programs can load, atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import parse_hf_uri
from torch import Tensor

from ...schemas.cache import StopTokens, reference_named
from ...schemas.checkpoint import State
from ...schemas.errors import CorruptionError, NonFiniteError, UsageError, counted
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
from ...stages.report.model_card import inline, model_card
from ...stages.storage.run.checkpoints import (
    CHECKPOINTS,
    best_checkpoint,
    best_first,
    best_metric,
)
from ...stages.storage.run.run_folder import remove_model, save_model
from ...stages.tracking.run_texts import public_name
from ..options.settings_table import paths
from .checkpoint import require_space_for_model
from .records import used_settings
from .resume import damage_on_ranks, versions

if TYPE_CHECKING:
    from .setup import Run


def state_to_write(run: Run, state: State) -> State:
    """The state whose model is written: the last, or with train.write_best the best checkpoint.

    The best one is loaded into the engine; the last step's checkpoint stays the newest.
    """
    best, folder = run.config.train.best, run.folder
    if not run.config.train.write_best:
        return state
    name = best_metric(best).metric
    try:
        found = run_on_rank_zero(run.world, lambda: best_checkpoint(folder, best))
        if found is None:
            raise UsageError(
                f"train.write_best: no checkpoint has {name}. To write the model of the last step, "
                "run the same command with --set train.write_best=false --resume auto."
            )
        path = folder.step(found.state.step)
        if why := damage_on_ranks(run.world, path, found):
            raise CHECKPOINTS.damaged(path, why)
    except CorruptionError as error:
        raise CorruptionError(
            f"{error} It may be the best one, which train.write_best needs. Remove or restore it, "
            "or run the same command with --set train.write_best=false --resume auto."
        ) from error
    if found.state.step != state.step:
        run.engine.load_state(path)
    run.records.log(
        f"writing the model of step {found.state.step:,}, whose checkpoint has the best {name}"
    )
    known = state.best
    if known and known.metric == best and known.value is not None:
        values = {found.state.step: found.state.metrics[name], known.step: known.value}
        if best_first(values, best)[0] != found.state.step:  # for example, step 0
            run.records.log(f"step {known.step:,} has a better {name}, but no checkpoint")
    return found.state


def write_model(run: Run, state: State) -> None:
    """Gathers the weights of all ranks; rank zero writes `model/`."""
    weights = run.engine.weights(trainable_only=run.config.lora.enabled)
    run_on_rank_zero(run.world, lambda: _write(run, state, weights))


def _write(run: Run, state: State, weights: Mapping[str, Tensor]) -> None:
    lora, source, folder = run.config.lora, Path(run.begins_as.path), run.folder
    require_space_for_model(run)
    # A training that ended with NaN weights is not finished.
    fixed = {name for name, one in run.policy.model.named_parameters() if not one.requires_grad}
    for name in weights.keys() - fixed:
        if not is_finite(weights[name]):
            raise NonFiniteError(
                f"{folder.root}: {name} has weights that are NaN or infinite after the last step, "
                "so no model is written. Lower train.lr, or use --dtype float32, and start again."
            )
    stops = StopTokens.of(run.manifest.fingerprint).of_template
    own, value_head = parted(weights)
    merges = lora.enabled and lora.merge
    if not merges:  # an earlier merged model would be mistaken for this one
        remove_model(folder.merged)

    def write(draft: Path) -> None:
        save = save_adapter if lora.enabled else save_whole
        save(run.policy.model, own, source, draft)
        finish(draft, is_adapter=lora.enabled)
        if merges:
            save_model(folder.merged, lambda merged: write_merged(draft, merged), run.run_id)

    def write_merged(adapter: Path, draft: Path) -> None:
        save_merged(run.begins_as, adapter, draft, scores=run.objective.head == "score")
        finish(draft, is_adapter=False)

    def finish(draft: Path, *, is_adapter: bool) -> None:
        if value_head:
            save_value_head(value_head, draft)
        if run.objective.head != "score":
            stop_generation_at(stops, source, draft)
        card = _card(run, state, is_adapter=is_adapter)
        (draft / "README.md").write_text(card, encoding="utf-8")

    save_model(folder.model, write, run.run_id)


def _card(run: Run, state: State, *, is_adapter: bool) -> str:
    """The model card: the model, method and rows, and their origins."""
    objective, manifest, policy = run.objective, run.manifest, public_name(run.begins_as.path)
    is_reward_model = objective.head == "score"
    # Settings name the data only of a cache that was made with them.
    is_own = run.config.train.cache in ("", run.config.cache.output)
    data = [one for one in run.config.data.files if is_own and one.startswith("hf://")]
    # The Hub reads both names as its own, so other models and data have none.
    of_hub = {
        "base_model": parse_hf_uri(policy).id if policy.startswith("hf://") else "",
        "datasets": sorted({parse_hf_uri(one).id for one in data}),
    }
    front = {
        **{name: value for name, value in of_hub.items() if value},
        "library_name": "peft" if is_adapter else "transformers",
        **({"pipeline_tag": "text-classification"} if is_reward_model else {}),
        "tags": ["align", objective.name, "preference-alignment"],
    }
    made = f"{'A LoRA adapter of ' if is_adapter else ''}`{inline(policy)}`"
    seen, rows = run.feed.rows_seen(state.step), run.source.train_rows
    again = ", some of them again" if seen > rows else ""
    text = [
        f"# {objective.name} with align",
        "",
        f"{'A reward model: ' if is_reward_model else ''}{made}, trained by `{objective.name}` for "
        f"{counted(state.step, 'steps')}, {counted(seen, 'rows')} seen out of {rows:,}{again}.",
        f"Loss: `{inline(objective.formula)}`.",
    ]
    if objective.head == "values":
        text += [
            "",
            "`value_head.safetensors` holds the value head that was trained with the policy, a "
            "linear layer on its last hidden states. It is not part of the model; ppo training "
            "from this folder starts with it.",
        ]
    if is_reward_model:
        of_text = causal_model(run.policy.model).config.get_text_config(decoder=True)
        padding_token = getattr(of_text, "pad_token_id", None)
        loader, more = "AutoModelForSequenceClassification", ""
        if is_adapter:
            loader = "AutoPeftModelForSequenceClassification"
            more = f", num_labels=1, pad_token_id={padding_token}"
        text += [
            "",
            f"Load it with `{loader}.from_pretrained(folder{more})`. Its one logit is the score of "
            "a prompt with its completion, read at the last token that is not the padding token "
            f"({padding_token}).",
        ]
    stops = StopTokens.of(manifest.fingerprint)
    ended = {"a turn": stops.turn, "a tool call": stops.tool_calls, "plain text": stops.text}
    settings = used_settings(run, "train")
    for name in paths() & settings.keys() - {"train.deepspeed"}:  # of this machine
        del settings[name]
    tables = {
        "Lineage": {
            "policy before training": reference_named(policy, public_name(run.begins_as.adapter)),
            "reference": reference_named(
                public_name(manifest.model), public_name(manifest.adapter)
            ),
            "reference weights": manifest.fingerprint["model.weights"],
            **({"data": ", ".join(data)} if data else {}),
            "cache": public_name(str(run.cache.root)),
            "cache id": manifest.root,
            **(run.records.origins() or {"MLflow run": "none"}),
        },
        "Data (sha256)": {entry.name: entry.sha256 for entry in manifest.inputs},
        "Method": {option: str(value) for option, value in objective.values.items()},
        "Stop tokens": {
            f"{what} ends with": stop.description for what, stop in ended.items() if stop
        },
        "Training": {**settings, "train.deepspeed": Path(settings["train.deepspeed"]).name},
        "Last metrics": {metric: f"{value:.6g}" for metric, value in state.metrics.items()},
        "Versions": versions(),
    }
    return model_card(front, text, tables)
