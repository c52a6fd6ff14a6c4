"""Live bytes of tensors, and the recognition of torch's out-of-memory errors.

torch's internals are used in this file only.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch, or of a CUDA library through it, means out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in str(error) for word in NO_MEMORY
    )


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations made and that are still alive.

    More operations than `limit` are refused, as a RuntimeError.
    """

    def __init__(self, device: str, limit: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self._operations = 0
        self._limit = limit
        self._device = device
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of the operation, whose storages are counted."""
        self._operations += 1
        if self._operations > self._limit:
            raise RuntimeError(f"a micro-batch takes more than {self._limit:,} operations")
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.most = max(self.most, self.now)

    def know(self, tensor: Tensor) -> None:
        """Excludes the storage of a tensor that was there before."""
        self._known[tensor.untyped_storage()._cdata] = tensor

    def restart(self) -> int:
        """The peak since the last restart; a new peak is measured from here on."""
        most, self.most = self.most, self.now
        return most
