"""The table of methods: every name `--method` knows, and how its options are read."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from ...schemas.codec import CodecError, from_plain
from ...schemas.errors import UsageError
from .anchored import APO_DOWN, APO_ZERO, BCO_PAIR, NCA, SPPO
from .kto import APO_ZERO_UNPAIRED, KTO, KTO_LOGSIGMOID, KTO_ZERO
from .likelihood import CPO, ORPO, SIMPO, SLIC
from .margins import CDPO, DISCOPOP, DPO, EXO, HINGE, ROBUST
from .options import check_bounds
from .per_token import DPO_NORM, IPO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...schemas.methods import Method

_ROWS = (
    DPO,
    CDPO,
    ROBUST,
    EXO,
    HINGE,
    DISCOPOP,
    IPO,
    DPO_NORM,
    NCA,
    BCO_PAIR,
    SPPO,
    APO_ZERO,
    APO_DOWN,
    ORPO,
    SIMPO,
    CPO,
    SLIC,
    KTO,
    KTO_ZERO,
    KTO_LOGSIGMOID,
    APO_ZERO_UNPAIRED,
)
METHODS: dict[str, Method] = {method.name: method for method in _ROWS}


def find_method(name: str) -> Method:
    """The method of this name; an unknown one is refused with those nearest to it."""
    if name in METHODS:
        return METHODS[name]
    near = _nearest(name.lower())
    known = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(METHODS)}."
    raise UsageError(f"method '{name}': no such method. {known} `align methods` explains them.")


def options_of(method: Method, values: Mapping[str, Any]) -> Any:
    """The method's options with these values; what is not given keeps its default."""
    try:
        options = from_plain(method.options, dict(values), where="method", partial=True)
    except CodecError as error:
        raise UsageError(f"{method.name}: {error}") from error
    check_bounds(options)
    return options


def _nearest(asked: str) -> list[str]:
    if asked in METHODS:
        return [asked]
    longer = [name for name in METHODS if asked and name.startswith(asked)]
    return longer or difflib.get_close_matches(asked, METHODS, n=3, cutoff=0.5)
