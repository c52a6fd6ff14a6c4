"""LoRA targets: the layers and parameters of a model that an adapter is put on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from ....schemas.errors import UsageError


def named_targets(model: nn.Module, targets: Sequence[str]) -> dict[str, Any]:
    """peft's target arguments: layers by the end of their names, and parameters of no layer.

    A mixture of experts may keep all experts of a layer in one parameter.
    """
    if not targets:
        return {"target_modules": "all-linear"}
    layers = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    of_none = [one for one in targets if not _is_end(one, layers) and _is_end(one, parameters)]
    found: dict[str, Any] = {"target_modules": [one for one in targets if one not in of_none]}
    return found | ({"target_parameters": of_none} if of_none else {})


def require_all_adapted(adapted: Any, targets: Sequence[str]) -> None:
    """Refuses targets that peft found in part only; peft itself refuses where it found none."""
    (settings,) = adapted.peft_config.values()
    names = _adapted_names(adapted)
    # peft renames targets where transformers has merged several stored weights.
    wanted = (
        [*settings.target_modules, *(getattr(settings, "target_parameters", None) or ())]
        if targets
        else []
    )
    if missing := sorted(one for one in wanted if not _is_end(one, names)):
        raise UsageError(
            f"lora.targets: no layer of this model is called {', '.join(missing)}. Name layers "
            "that it has, or leave lora.targets empty."
        )


def adapts_experts(model: Any) -> bool:
    """Whether a model has an adapter that changes the experts of a mixture."""
    return any("experts." in name for name in _adapted_names(model))


def _adapted_names(adapted: Any) -> Collection[str]:
    inner = adapted.base_model
    # Older versions of peft adapt layers only.
    return [*inner.targeted_module_names, *getattr(inner, "targeted_parameter_names", ())]


def _is_end(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
