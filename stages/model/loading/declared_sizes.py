"""The sizes that config.json declares, held against the tensors that are stored.

A layer is built by a loop and a buffer is allocated, whether or not anything is stored for it. So
what config.json asks for is bounded by what is there, before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from .model_folder import StoredTensor

_LAYERS = re.compile(
    r"(\w+_)?n(um)?_(\w+_)?layers?|(en|de)coder_layers|attention_types|num_hidden_groups"
)
_SIZES = re.compile(
    r"(\w+_)?(size|dim|dims|rank|heads|experts|embd|inner|width|groups)|d_(model|ff|kv|inner)"
    r"|n_(head|embd|inner)|num_labels|r|expand"
)
# Without these there is no model: a zero would divide, and a null is no size.
_NEEDED = frozenset(
    {"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "n_embd", "n_head"}
    | {"n_layer", "d_model"}
)
_POSITIVE = frozenset(
    {"max_position_embeddings", "n_positions", "head_dim", "rope_theta", "r"}
    | {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}
)
_EPSILON = re.compile(r"(\w+_)?(eps|epsilon)")
_FLOATS = 2.0**-126, 2.0**128  # between them float32 has the number, and computes with it
_LARGEST = 2**63  # beyond it a library would count wrongly
# Several small numbers may be stored in one (16 of 2 bits in 32), and several sizes in one tensor.
PACKED = 32
_SMALLEST_BOUND = 65_536  # a size of something that this model may not even use
_WITHOUT_TENSORS = 10_000, 1 << 24  # a folder that only has its config.json: layers and sizes
BITS_OF_A_PARAMETER = 1  # the fewest that any quantization stores, rounded down
LARGEST_BUFFERS = 1 << 28  # bytes: the masks and tables of a model that are not stored

OTHER_CONFIG = "Use the config.json that belongs to these weights."


def require_declared_sizes(
    file: Path, settings: dict[str, Any], tensors: Sequence[StoredTensor]
) -> None:
    """Refuses a config whose numbers are no sizes, or larger than what is stored allows."""
    layers, size = _WITHOUT_TENSORS
    if tensors:
        longest = max(max(tensor.shape, default=1) for tensor in tensors)
        layers, size = len(tensors), max(PACKED * longest, _SMALLEST_BOUND)
    for name, value in _entries(settings):
        key = name.rpartition(".")[2]
        _require_kind(file, name, key, value)
        is_layers = _LAYERS.fullmatch(key)
        is_rank = name.startswith("rank_pattern.")  # of layers by name, in an adapter
        if not (is_layers or is_rank or _SIZES.fullmatch(key)):
            continue
        most = layers if is_layers else size
        if key == "num_labels":  # of a head that is never packed; each gets a name of its own
            most = size // PACKED
        for number in _numbers(value):
            if number < 0 and number != -1:  # which some write for "none"
                raise _wrong(file, name, number, "a whole number of 0 or more")
            if number > most:
                raise UsageError(
                    f"{file}: {name} is {number:,}, and with the tensors that are stored "
                    f"{most:,} would be the most. {OTHER_CONFIG}"
                )


def _require_kind(file: Path, name: str, key: str, value: Any) -> None:
    """Refuses a value of another kind than such a setting has."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise _wrong(file, name, value, "a number of 64 bits")
    if isinstance(value, float) and not _is_float(value) and not name.endswith("limit"):
        raise _wrong(file, name, value, "0 or a number that float32 can hold")
    is_missing = value is None and "." in name  # in a part, which may be of images
    if key in _NEEDED and not is_missing and not (type(value) is int and value > 0):
        # Some architectures have a size for each layer.
        if not (isinstance(value, list) and value):
            raise _wrong(file, name, value, "a whole number above 0")
    elif key in _POSITIVE and value is not None and not _is_positive(value):
        raise _wrong(file, name, value, "a number above 0")
    elif _EPSILON.fullmatch(key) and not (value is None or (_is_number(value) and 0 <= value < 1)):
        raise _wrong(file, name, value, "a number from 0 up to 1")
    elif key == "attention_dropout" and not (_is_number(value) and 0 <= value <= 1):
        raise _wrong(file, name, value, "a number from 0 to 1")


def _is_float(value: float) -> bool:
    return value == 0 or _FLOATS[0] <= abs(value) < _FLOATS[1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    """Whether it is a number above 0, or one for each layer or kind of layer."""
    if isinstance(value, dict | list):
        return bool(value)
    return _is_number(value) and value > 0


def _wrong(file: Path, name: str, value: Any, kind: str) -> UsageError:
    shown = f"{value!r:.60}" if not isinstance(value, int) or abs(value) < _LARGEST else "larger"
    return UsageError(f"{file}: {name} is {shown}, and must be {kind}. {OTHER_CONFIG}")


def _entries(settings: dict[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """All settings by dotted name, those of parts of the model included."""
    for key, value in settings.items():
        name = f"{outer}.{key}" if outer else key
        yield name, value
        if isinstance(value, dict):
            yield from _entries(value, name)


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers of a setting that has one, or one for each layer."""
    if type(value) is int:
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(one)


def require_stored_parameters(
    file: Path, settings: dict[str, Any], skeleton: nn.Module, tensors: Sequence[StoredTensor]
) -> None:
    """Refuses a model, built on no device, that is larger than what is stored.

    Tied parameters are counted once. Buffers that are not stored are allocated all the same.
    """
    stored = sum(tensor.num_bytes for tensor in tensors)
    asked = sum(parameter.numel() for parameter in skeleton.parameters())
    if tensors and asked > 8 * stored // BITS_OF_A_PARAMETER:
        name, largest = max(skeleton.named_parameters(), key=lambda named: named[1].numel())
        raise UsageError(
            f"{file}: asks for {asked:,} parameters, and the {stored:,} bytes that are stored "
            f"cannot hold them. {name} would be {list(largest.shape)}"
            f"{named_sizes(settings, largest.shape)}. {OTHER_CONFIG}"
        )
    buffers = [*skeleton.named_buffers()]
    total = sum(one.numel() * one.itemsize for _, one in buffers)
    if buffers and total > max(LARGEST_BUFFERS, stored):
        name, buffer = max(buffers, key=lambda named: named[1].numel())
        raise UsageError(
            f"{file}: the model would need {total:,} bytes for what is not stored, most of them "
            f"for {name} of {list(buffer.shape)}{named_sizes(settings, buffer.shape)}. "
            f"{OTHER_CONFIG}"
        )


def require_enough_experts(file: Path, config: Any) -> None:
    """Refuses a mixture that would choose more experts for a token than it has, or -1."""
    chosen = getattr(config, "num_experts_per_tok", None)
    if type(chosen) is int and chosen < 0:
        raise UsageError(f"{file}: num_experts_per_tok is {chosen}. {OTHER_CONFIG}")
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if type(chosen) is int and type(experts) is int and 0 < experts < chosen:
            raise UsageError(
                f"{file}: num_experts_per_tok is {chosen} (or is by default), and "
                f"{name} only {experts}. {OTHER_CONFIG}"
            )


def named_sizes(settings: dict[str, Any], shape: Sequence[int]) -> str:
    """The settings whose values are in a shape, for a message: ` (hidden_size is 64)`."""
    found = [
        f"{name} is {value}"
        for name, value in _entries(settings)
        if type(value) is int and value > 1 and value in {*shape}
    ]
    return f" ({', '.join(found[:4])})" if found else ""
