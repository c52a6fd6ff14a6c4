"""Adapters of peft: loads a saved one, adds a fresh one for training, and merges either."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...schemas.errors import UsageError
from ...schemas.train_options import LoraOptions
from .library_errors import as_usage_error, in_short
from .model_folder import adapter_tensors, require_adapter
from .transformers_compat import is_composite, is_reward_model, quiet


def with_adapter(model: Any, folder: str, *, is_trainable: bool = False) -> Any:
    """The model with a saved adapter, which alone may learn; one of another model is refused.

    In 16 bits peft loads adapters in float32.
    """
    require_adapter(folder)
    # Optional, and slow to import.
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict  # noqa: PLC0415

    made_for = "Set model.adapter to a PEFT adapter made for model.path."
    cannot = f"{folder}: the adapter of adapter_config.json cannot be added to the model"
    with as_usage_error(cannot, made_for):
        kind = PeftConfig.from_pretrained(folder, local_files_only=True)
        if kind.is_prompt_learning or getattr(kind, "alora_invocation_tokens", None):
            raise ValueError("adapters of prompt tokens, or after some tokens, are not supported")
        adapted: Any = PeftModel.from_pretrained(
            model, folder, is_trainable=is_trainable, local_files_only=True
        )
    # peft skips tensors that do not fit, and may store a fully trained layer twice.
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    names = [tensor.name for tensor in adapter_tensors(Path(folder))]
    stored = {name.replace(".modules_to_save.", ".") for name in names}
    missing, unused = sorted(wanted - stored), sorted(stored - wanted - set(adapted.state_dict()))
    if missing or unused:
        raise UsageError(
            f"{folder}: the adapter does not fit the model: {len(missing)} tensors are missing "
            f"(first: {missing[:3]}) and {len(unused)} are not used (first: {unused[:3]}). "
            f"{made_for}"
        )
    if is_trainable:
        _require_read(adapted)
    return adapted


def add_lora(model: Any, options: LoraOptions, seed: int) -> nn.Module:
    """The model with a fresh adapter, the same on every rank; everything else is frozen."""
    with quiet():
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - optional, and slow to import

    settings = LoraConfig(
        # For a model that scores, peft also trains and saves the whole head.
        task_type="SEQ_CLS" if is_reward_model(model) else "CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        lora_dropout=options.dropout,
        **_named_targets(model, options.targets),
    )
    instead = f" Its linear layers are {', '.join(_linear_layers(model))}."
    layer = model.get_output_embeddings()
    head = next((name for name, module in model.named_modules() if module is layer), "")
    dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
    try:
        with quiet(), torch.random.fork_rng():
            torch.manual_seed(seed)
            adapted: Any = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UsageError(
            f"lora.targets: {options.targets or 'all-linear'} cannot be adapted "
            f"({in_short(error)}). Name layers of this model, or leave lora.targets empty.{instead}"
        ) from error
    if head in adapted.base_model.targeted_module_names:
        raise UsageError(
            f"lora.targets: {options.targets} includes the output layer {head}, whose adapter the "
            "fused log-prob head would ignore. Leave it out."
        )
    _require_read(adapted)
    _require_all_adapted(adapted, options.targets, instead)
    for parameter in adapted.parameters():
        # For quantized weights, which are stored as integers, peft makes a float32 adapter.
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    trainable: nn.Module = adapted
    return trainable


def merged(model: Any) -> nn.Module:
    """The plain model, with an adapter merged into the weights."""
    if not hasattr(model, "merge_and_unload"):
        return model  # type: ignore[no-any-return]
    cannot = "The adapter of adapter_config.json cannot be merged into the model"
    with as_usage_error(cannot, "Merge it with PEFT, or train without it."), quiet():
        plain: nn.Module = model.merge_and_unload()
    return plain


def _named_targets(model: Any, targets: Sequence[str]) -> dict[str, Any]:
    """peft's target arguments: layers by the end of their names, and single parameters.

    A mixture of experts may keep all experts of a layer in one parameter. A composite has a pattern
    for its language model alone: towers have layers of the same names, where the adapter is loaded.
    """
    excluded: dict[str, Any] = {}
    if not targets:
        excluded = {"exclude_modules": _read_by_kernels(model) or None}
    if not targets and not is_composite(model):
        return {"target_modules": "all-linear", **excluded}
    layers = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    of_none = [one for one in targets if not _is_end(one, layers) and _is_end(one, parameters)]
    ends = [one for one in targets or _linear_layers(model.get_decoder()) if one not in of_none]
    found: dict[str, Any] = {"target_modules": ends}
    if is_composite(model):
        decoder = next(name for name, one in model.named_modules() if one is model.get_decoder())
        pattern = "|".join(map(re.escape, ends))
        found = {"target_modules": rf"{re.escape(decoder)}\.(.*\.)?({pattern})"}
    return found | excluded | ({"target_parameters": of_none} if of_none else {})


def _linear_layers(model: Any) -> list[str]:
    """The names that linear layers have in their modules, without the output layer's."""
    head = model.get_output_embeddings()
    kinds = {name: type(one).__name__ for name, one in model.named_modules() if one is not head}
    linear = [name for name, kind in kinds.items() if "Linear" in kind or kind == "Conv1D"]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def _read_by_kernels(model: nn.Module) -> list[str]:
    """The output projections of Mamba 2, whose kernel reads the weight and not the adapter."""
    mixers = {name: one for name, one in model.named_modules() if hasattr(one, "A_log")}
    # Mamba 1 has a matrix of decays, and a delta rule does not skip its inputs. ZeRO-3 flattens
    # parameters, and keeps their shapes.
    shapes = {name: getattr(one.A_log, "ds_shape", one.A_log.shape) for name, one in mixers.items()}
    of_mamba = [name for name in mixers if len(shapes[name]) == 1 and hasattr(mixers[name], "D")]
    return [f"{name}.out_proj" for name in of_mamba]


def _require_read(adapted: Any) -> None:
    """Refuses to train an adapter that a kernel would ignore."""
    unread = {*_read_by_kernels(adapted.get_base_model())}
    if ignored := sorted(unread.intersection(_adapted_names(adapted))):
        raise UsageError(
            f"lora.targets: the kernel of {ignored[0]} reads its weight alone, so no adapter of it "
            "can be trained. Leave the layer out; for a saved adapter, pass --lora-start merge."
        )


def _require_all_adapted(adapted: Any, targets: Sequence[str], instead: str) -> None:
    """Refuses targets of which peft found only some; peft itself refuses if it found none."""
    if not targets:
        return
    (settings,) = adapted.peft_config.values()
    # peft renames targets where transformers has merged several stored weights.
    layers = targets if isinstance(settings.target_modules, str) else settings.target_modules
    wanted = {*layers, *(settings.target_parameters or ())}
    names = _adapted_names(adapted)
    if missing := sorted(one for one in wanted if not _is_end(one, names)):
        raise UsageError(
            f"lora.targets: no layer of this model is called {', '.join(missing)}. Name layers "
            f"that it has, or leave lora.targets empty.{instead}"
        )


def adapts_experts(model: Any) -> bool:
    """Whether a model has an adapter that changes the experts of a mixture."""
    return any("experts." in name for name in _adapted_names(model))


def _adapted_names(adapted: Any) -> Collection[str]:
    inner = adapted.base_model
    return [*inner.targeted_module_names, *inner.targeted_parameter_names]


def _is_end(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
