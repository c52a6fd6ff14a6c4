"""The bytes of all tensors of a process."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages on the CPU that operations made and that are still alive.

    Those of `held` are not counted: an operation may give a part of one of them.
    """

    def __init__(self, held=()):
        super().__init__()
        self.now = self.most = 0
        self._known = {one.untyped_storage()._cdata: one for one in held}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.count(leaf)
        return result

    def count(self, tensor):
        """Counts the storage of a tensor, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_):
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.most = max(self.most, self.now)

    def restart(self):
        """Measures a new peak from here on."""
        self.most = self.now
