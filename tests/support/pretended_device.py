"""A pretended accelerator: its tensors claim to be there, and the CPU computes their numbers.

Inside `PretendedDevice()` an operation on tensors of both devices raises, in a backward pass too,
and everything for which a host would wait for a GPU is written down with the line of align that
asked for it. It changes what torch takes for the accelerator of the whole process, so a program
that uses it runs in a process of its own.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from align.stages.model import fused_head
from support.waits import Waits


class _Event:
    """An event that has happened: copies are made at once."""

    def synchronize(self):
        """Notes that the host waits for all that was queued before the event."""
        WAITS.add("an event")


class _Stream:
    """A stream that does its work at once."""

    record_event = staticmethod(_Event)


class _Module:
    """The module `torch.pretend` as torch needs it; random numbers come from the CPU."""

    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    current_stream = staticmethod(lambda device=None: _Stream())
    manual_seed_all = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])


_setup_privateuseone_for_python_backend("pretend", backend_module=_Module())
aten = torch.ops.aten
DEVICE = torch.device("pretend", 0)
WAITS = Waits()
# The sizes of a CPU, with which sums of tiles are equal to the last bit.
for tiles in (fused_head.TILE_ROWS, fused_head.TILE_VOCABULARY):
    tiles[DEVICE.type] = tiles["cpu"]
# They take tensors of two devices, as on a GPU.
COPIES = {aten.copy_.default, aten._to_copy.default}
# The size of their result, or the next operation, depends on numbers of the device.
ASKING = {
    aten._local_scalar_dense.default,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}


class Pretended(torch.Tensor):
    """A tensor on the device; `raw` holds its numbers."""

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
        )

    def __init__(self, raw):
        self.raw = raw

    def __repr__(self):
        return f"Pretended({self.raw})"

    def tolist(self):
        """Notes that the host waits: torch reads the memory of a plain tensor."""
        WAITS.add("tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Inside, tensors can be made on `DEVICE`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    if torch.is_inference_mode_enabled() and _is_composite(func):
        with PretendedDevice():  # it arrives whole in that mode alone
            return func.decompose(*args, **kwargs)
    flat, shape = tree_flatten((args, kwargs))
    here = [one for one in flat if isinstance(one, Pretended)]
    if func is aten.is_pinned.default:
        return _is_pinned(args[0])
    if func is aten._pin_memory.default:
        pinned = args[0].clone()
        pinned.is_pretended_pinned = True
        return pinned
    _require_one_device(func, flat, here)
    leaves = _leaves(func, args, kwargs)
    if here and (func in ASKING or leaves or _asks(func, args, kwargs)):
        WAITS.add(str(func))
    elif _is_slow_copy(func, args, kwargs):
        WAITS.add(f"{func} of memory that is not pinned")
    given, named = tree_unflatten(map(_raw, flat), shape)
    if func is aten._to_copy.default:
        named.pop("non_blocking", None)
    is_pinned = named.pop("pin_memory", None)
    out = func(*given, **named)
    if is_pinned:
        out.is_pretended_pinned = True
    stays = not (here or _is_here(kwargs.get("device"))) or leaves
    if stays or (func is aten.copy_.default and not isinstance(args[0], Pretended)):
        return out
    wrapped = tree_map(_wrapped, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _is_composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_pinned(tensor):
    return getattr(tensor, "is_pretended_pinned", False)


def _require_one_device(func, flat, here):
    others = [
        one
        for one in flat
        if isinstance(one, torch.Tensor) and not isinstance(one, Pretended) and one.dim() > 0
    ]
    if here and others and func not in COPIES:
        raise RuntimeError(f"{func}: tensors on {DEVICE} and on {others[0].device}")


def _is_here(device):
    return device is not None and torch.device(device).type == DEVICE.type


def _leaves(func, args, kwargs):
    """Whether it copies numbers from the device to the host."""
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        return isinstance(args[0], Pretended) and device is not None and not _is_here(device)
    if func is aten.copy_.default:
        is_waited_for = not (len(args) > 2 and args[2] and _is_pinned(args[0]))
        leaves = isinstance(args[1], Pretended) and not isinstance(args[0], Pretended)
        return leaves and is_waited_for
    return False


def _is_slow_copy(func, args, kwargs):
    """Whether it copies numbers to the device, and the host waits until they are there."""
    if func is aten._to_copy.default:
        source, wanted = args[0], kwargs.get("non_blocking")
        comes = not isinstance(source, Pretended) and _is_here(kwargs.get("device"))
    elif func is aten.copy_.default:
        source, wanted = args[1], len(args) > 2 and args[2]
        comes = isinstance(args[0], Pretended) and not isinstance(source, Pretended)
    else:
        return False
    return comes and not (wanted and _is_pinned(source))


def _asks(func, args, kwargs):
    """Whether the host needs a number of the device first, by the arguments."""
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}:
        places = [one for one in args[1] if one is not None]
        return any(one.dtype in {torch.bool, torch.uint8} for one in places)
    if func is aten.segment_reduce.default:
        return not kwargs.get("unsafe", False)
    return False


def _raw(value):
    if isinstance(value, Pretended):
        return value.raw
    is_device = isinstance(value, torch.device)
    return torch.device("cpu") if is_device and _is_here(value) else value


def _wrapped(value):
    if not isinstance(value, torch.Tensor) or isinstance(value, Pretended):
        return value
    with torch.inference_mode(False):  # otherwise torch refuses views of it
        return Pretended(value)


# Below any mode: `torch.tensor(…, device=…)` makes its storage and fills it there.
def _empty(size, stride=None, *, dtype=None, layout=None, device=None, pin_memory=None, **_):
    strided = stride is not None
    make = torch.empty_strided if strided else torch.empty
    return Pretended(make(*((size, stride) if strided else (size,)), dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    is_slow = not isinstance(source, Pretended) and not (non_blocking and _is_pinned(source))
    if is_slow or not isinstance(target, Pretended):
        WAITS.add("a copy of memory that is not pinned")
    _raw(target).copy_(_raw(source))
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty_strided", _empty, "PrivateUse1")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
