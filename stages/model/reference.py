"""The frozen models of stage 1 as scorers: a reference, or a reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForSequenceClassification

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from ...schemas.file_version import Remember, digest_anew
from ...schemas.rows import OutOfMemory, Tree
from .copies import on_host
from .flex_attention import why_no_flex
from .fused_head import HEAD_VERSION
from .library_errors import is_out_of_memory
from .load import Resolved, load_causal_lm, resolve, unused_weights
from .logprobs import input_device, require_known_ids, tree_logps, tree_scores
from .model_folder import UNUSED_WEIGHTS, ModelFiles, model_identity, require_adapter
from .path_search import choose_path, explaining_compile_errors
from .reward_model import architecture, load_reward_model
from .transformers_compat import SCORES

SCORE_VERSION = "score-1 float32"


class HfReference:
    """The reference in a Hugging Face model folder, with or without a PEFT adapter."""

    _kind: Any = None  # a language model

    def __init__(self, options: ModelOptions, remember: Remember = digest_anew) -> None:
        self.options = options
        self._remember = remember

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without file versions, as another process may be on another machine."""
        return {"options": self.options, "_remember": self._remember}

    def identity(self) -> Mapping[str, str]:
        """Digests of the model's files and settings of its computation; loads no weights."""
        if self.options.adapter:
            require_adapter(self.options.adapter)
        resolved, files = self._resolved, self._files
        unused = unused_weights(self.options, self._kind)
        identity = {
            **model_identity(self.options, self._remember),
            **({UNUSED_WEIGHTS: str(len(unused))} if unused else {}),
            "model.dtype": resolved.dtype,
            "model.attention": resolved.attention,
            "model.device": resolved.device,
            "numerics.torch": _minor("torch"),
            "numerics.transformers": _minor("transformers"),
            "numerics.head": HEAD_VERSION,
        }
        files.require_unchanged()
        return identity

    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._resolved.hidden_size

    @property
    def device(self) -> str:
        """The device of the model."""
        return self._resolved.device

    def context(self) -> int | None:
        """Most tokens of a text; None if the model has no bound."""
        return self._resolved.context

    def open(self) -> TreeScorer:
        """A scorer with the weights loaded, with the path that the probe chose."""
        return TreeScorer(self.load(), self._files, why_no_flex(self.options.attention))

    def load(self) -> nn.Module:
        """The loaded model; refuses files that changed after they were digested."""
        files = self._files
        model = self._loaded()
        files.require_unchanged()
        return model

    def _loaded(self) -> nn.Module:
        return load_causal_lm(self.options)

    def require_unchanged(self) -> None:
        """Refuses files that changed after they were digested."""
        self._files.require_unchanged()

    @cached_property
    def _files(self) -> ModelFiles:
        return ModelFiles.of(self.options)

    @cached_property
    def _resolved(self) -> Resolved:
        return resolve(self.options)


class HfReward(HfReference):
    """A sequence-classification model with one label, in a Hugging Face folder."""

    _kind = AutoModelForSequenceClassification

    def identity(self) -> Mapping[str, str]:
        """A reference's identity, with the version of scores instead of the head's."""
        if not (kind := architecture(self.options.path)).endswith(SCORES):
            raise UsageError(
                f"{self.options.path} is not a reward model: its config.json names "
                f"{kind or 'no architecture'}. Train one with `align train --method "
                "reward`, or name a sequence-classification model."
            )
        return {**super().identity(), "numerics.head": SCORE_VERSION}

    def _loaded(self) -> nn.Module:
        return load_reward_model(self.options, seed=0).eval().requires_grad_(False)


def _minor(package: str) -> str:
    """The version of a package without the patch number, which does not change results."""
    return ".".join(version(package).split(".")[:2])


class TreeScorer:
    """A loaded model that scores trees with the path that the probe chose."""

    def __init__(
        self, model: nn.Module, files: ModelFiles | None = None, no_flex: str = ""
    ) -> None:
        """`files`: the model's files, which are compared after each batch."""
        self.model = model
        self._files = files
        with torch.inference_mode():
            self.path = choose_path(model, no_flex=no_flex, learns=False)

    @property
    def pads(self) -> bool:
        """Whether each tree is padded to the longest of its batch."""
        return not self.path.packs and self.path.layout != "once"

    def describe(self) -> Mapping[str, str]:
        """The layout and head that the probe chose, and on a CPU the number of threads."""
        path: dict[str, str] = {"layout": self.path.layout, "head": self.path.head}
        on_cpu = input_device(self.model).type == "cpu"
        return {**path, "threads": str(torch.get_num_threads())} if on_cpu else path

    def launch(self, trees: Sequence[Tree]) -> Callable[[], NDArray[np.float32]]:
        """Queues the passes of a batch on a GPU; the returned function waits for their values."""
        require_known_ids(self.model, trees)
        try:
            with torch.inference_mode(), explaining_compile_errors():
                read = on_host(self._numbers(trees))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            tokens = sum(tree.num_tokens for tree in trees)
            refusal = OutOfMemory(f"no memory for {len(trees)} trees of {tokens} tokens")
        else:
            return partial(self._of_same_files, read)
        # Outside the handler: the traceback no longer keeps the failed batch alive.
        torch.cuda.empty_cache()
        raise refusal

    def score(self, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Log p of every completion token, in the order tree, branch, token."""
        return self.launch(trees)()

    def _of_same_files(self, read: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:
        logps = read()
        if self._files:
            self._files.require_unchanged()
        return logps

    def _numbers(self, trees: Sequence[Tree]) -> torch.Tensor:
        """The log-prob of each token, or a branch's score at its last token and zeros: (T,)."""
        if self.path.head != "score":
            return tree_logps(self.model, trees, self.path)
        scores = tree_scores(self.model, trees, self.path)
        lengths = [len(branch) for tree in trees for branch in tree.branches]
        numbers = scores.new_zeros(sum(lengths))
        numbers[np.cumsum(lengths) - 1] = scores
        return numbers


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Runs torch with this number of threads, which decides the last bits of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
