"""How many bytes of tensors a process holds at once."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations made and that are still alive, and keeps the most.

    Those of `held` are not counted: an operation may give a part of one of them.
    """

    def __init__(self, held=()):
        super().__init__()
        self.most = 0
        # Bytes of each storage, by a weak reference to it.
        self._live = {StorageWeakRef(one.untyped_storage()): 0 for one in held}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [
            one
            for one in tree_leaves(result)
            if isinstance(one, torch.Tensor) and one.device.type != "meta"
        ]
        if made:
            self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        for one in made:
            storage = one.untyped_storage()
            self._live.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(self._live.values()))
        return result
