"""What an operation on the way costs in memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestStorage(TorchDispatchMode):
    """Notes the largest storage that any operation returns, other than the ones given."""

    def __init__(self, ignore):
        super().__init__()
        self.ignore = ignore
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.ignore:
                self.elements = max(self.elements, storage.nbytes() // 4)
        return result
