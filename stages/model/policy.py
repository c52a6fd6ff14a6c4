"""The policy of stage 2: the trained model, scored in the same way as the reference.

Some methods also train a value head, which is saved in a file of its own next to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from ...schemas.methods import ROUTING, Head
from ...schemas.rows import Tree
from ...schemas.train_options import LoraOptions, TrainOptions
from .adapters import add_lora, merged, with_adapter
from .cheap_again import cheap_computed_again, drops_cheap
from .flex_attention import why_no_flex
from .fused_head import call_head_for_logps, output_head
from .library_errors import as_usage_error
from .load import load_in_4_bits, load_model, text_config
from .logprobs import (
    ScalarHead,
    ScoringPath,
    branch_outputs,
    branch_scores,
    causal_model,
    input_device,
    require_known_ids,
)
from .mixer_rows import gather_around_mixers
from .path_search import Agree, choose_path, explaining_compile_errors
from .transformers_compat import (
    beside_text,
    is_reward_model,
    quiet,
    recompute_activations,
    routers_of,
)
from .tree_attention import TreeBatch

_ONE_TOKEN = np.zeros(1, np.int32)
COEFFICIENT = "router_aux_loss_coef"  # of every model with a load-balancing loss in transformers
VALUE_HEAD = "value_head"  # its name in the policy, and its file
# The input of a rank without rows: under ZeRO-3 other ranks wait for its collective calls.
NOTHING = Tree(_ONE_TOKEN, (_ONE_TOKEN,))


def load_policy(
    model: ModelOptions,
    train: TrainOptions,
    lora: LoraOptions,
    *,
    head: Head = "none",
    collision_logps: bool = False,
    load: Callable[..., nn.Module] = load_model,
) -> Policy:
    """The policy, initialized from this model with its adapter, merged into it or trained further.

    `load` is `load_sharded` under ZeRO-3, where `choose_path` is called once the engine is open.
    """
    adapter = lora.continued(model.adapter)
    frozen = "" if adapter else model.adapter
    options = replace(model, dtype=train.dtype, device_map="", adapter=frozen)
    if lora.quantize != "none":
        load = load_in_4_bits
    balanced = train.router_loss > 0
    if balanced and getattr(config := text_config(options), COEFFICIENT, None) is None:
        raise UsageError(
            f"{options.path}: transformers has no load-balancing loss for {config.model_type} (its "
            f"config lacks {COEFFICIENT}): it is not a mixture of experts, or is balanced in "
            "another way. Set train.router_loss to 0."
        )
    if head == "score":
        from .reward_model import load_reward_model  # noqa: PLC0415 - few runs need it

        loaded = load_reward_model(options, train.seed, load)
    else:
        loaded = merged(load(options))
    loaded = prepare_for_training(loaded, train, lora, adapter)
    no_flex = why_no_flex(options.attention, causal_model(loaded).config)
    policy = Policy(
        loaded, head=head, collision_logps=collision_logps, balanced=balanced, no_flex=no_flex
    )
    # Training starts from the value head that was saved with the model, if there is one.
    if policy.value_head and (file := stored_value_head(model)):
        read_value_head(policy.value_head, file)
    if train.recomputes:
        policy.recompute_activations(on_host=train.offloads_inputs)
    return policy


def prepare_for_training(
    model: nn.Module, train: TrainOptions, lora: LoraOptions, adapter: str = ""
) -> nn.Module:
    """Sets dropout, adapter and frozen parameters of a model with or without weights.

    `adapter`: the folder of a saved one that is trained further.
    """
    if adapter:
        with quiet():
            model = with_adapter(model, adapter, is_trainable=True)
        _unify_dtypes(model)
    if not train.dropout:
        turn_dropout_off(model)
    if adapter:
        return model
    if not lora.enabled:
        others = beside_text(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in others)
        return model
    options = lora if train.dropout else replace(lora, dropout=0.0)
    return add_lora(model, options, train.seed)


def _unify_dtypes(model: Any) -> None:
    """Casts the trained weights to the base's dtype where they cannot all stay in float32.

    A float16 base needs float16 ones, because DeepSpeed scales the loss for those only. Whole
    layers beside an adapter have the base's dtype, and DeepSpeed flattens weights of one dtype.
    """
    learning = [one for one in model.parameters() if one.requires_grad]
    base = model.dtype
    if base == torch.float16 or any(one.dtype != torch.float32 for one in learning):
        for one in learning:
            one.data = one.data.to(base)


class Policy(nn.Module):
    """A language model, with or without an adapter, that returns log-probs or scores."""

    def __init__(
        self,
        model: nn.Module,
        *,
        head: Head = "none",
        collision_logps: bool = False,
        balanced: bool = False,
        no_flex: str = "",
    ) -> None:
        """`balanced`: whether the sums of a mixture's routers are an output.

        `no_flex`: why FlexAttention may not be used; empty: it may.
        """
        super().__init__()
        self.model = model
        # Read once: under ZeRO-3 an open engine would gather the accessed weight.
        self.device = input_device(model)
        self.is_sharded = any(hasattr(one, "ds_id") for one in model.parameters())
        self._no_flex = no_flex
        self._recomputes = False
        self._routers = None
        if balanced:
            from .router_watch import RouterWatch  # noqa: PLC0415 - as above

            self._routers = RouterWatch(causal_model(model))
        if self.is_sharded:
            gather_around_mixers(causal_model(model))
        else:
            self.choose_path()
        # Outside the model, so that saved weights and adapters do not include it.
        self.value_head = value_head(causal_model(model)) if head == "values" else None
        wanted = {
            "logps": True,
            "collision_logps": collision_logps,
            "values": head == "values",
            ROUTING: balanced,
        }
        self.output_names = tuple(name for name, is_asked in wanted.items() if is_asked)
        self.train()

    def choose_path(self, agree: Agree = bool) -> None:
        """Chooses the layout and head by the probe; `agree` makes all ranks choose the same.

        Under ZeRO-3 it needs the engine, which gathers a weight around its module's call.
        """
        inner = causal_model(self.model)
        if self.is_sharded and not is_reward_model(inner) and output_head(inner):
            call_head_for_logps(inner)
        with torch.no_grad():
            self.path: ScoringPath = choose_path(self.model.eval(), agree, self._no_flex)
        if self.path.head == "fused":
            call_head_for_logps(inner)
        self.train()

    @property
    def dtype(self) -> str:
        """The dtype of computation, as settings name it."""
        return str(causal_model(self.model).dtype).removeprefix("torch.")

    @explaining_compile_errors()
    def forward(self, trees: Sequence[Tree]) -> Tensor | tuple[Tensor, ...]:
        """An output per name in `output_names`: float32, one number per completion token.

        Scores are one number per branch. With balanced experts, the last output has the routers'
        sums over all tokens, with prompts. The model runs exactly once for any number of trees,
        even zero, so all ranks run the same collective calls.
        """
        require_known_ids(self.model, trees)
        rows = trees or (NOTHING,)
        laid_out = self.path.rows(rows)
        batch = self.path.batch(laid_out, self.device)
        drops = torch.is_grad_enabled() and not self._recomputes
        drops = drops and drops_cheap(
            self.device.type,
            is_partitioned=any(hasattr(one, "ds_id") for one in self.model.parameters()),
        )
        with (
            self._routers.watching() if self._routers else nullcontext(),
            cheap_computed_again() if drops else nullcontext(),
        ):
            if self.path.head == "score":
                outputs = branch_scores(self.model, laid_out, batch, self.path)[None]
            else:
                outputs = self._of_tokens(batch)
        outputs = outputs if trees else outputs[:, :0]
        if self._routers is None:
            return outputs
        has_copies = self.path.layout == "plain"
        return *outputs, self._routers.sums(trees, batch, has_copies=has_copies)

    def _of_tokens(self, batch: TreeBatch) -> Tensor:
        collision_logps, head = "collision_logps" in self.output_names, self.value_head
        rows, states = branch_outputs(
            self.model, batch, self.path, collision_logps=collision_logps, states=head is not None
        )
        if head is None:
            return rows
        return torch.cat([rows, head(states).t().to(rows.device)])

    def recompute_activations(self, *, on_host: bool = False) -> None:
        """Turns gradient checkpointing on; `on_host` keeps the inputs of layers on the CPU."""
        keeping = None
        if on_host:
            from .host_activations import keeps_on_host  # noqa: PLC0415 - as above

            keeping = keeps_on_host
        recompute_activations(causal_model(self.model), keeping)
        self._recomputes = True


RANDOM = ("drop", "jitter")  # as in attention_dropout, resid_pdrop, layerdrop, router_jitter_noise


def turn_dropout_off(model: nn.Module) -> None:
    """Sets every dropout probability to zero, in modules and in their configs."""
    drawing = [router for router in routers_of(model) if hasattr(router, "router_jitter_noise")]
    for router in drawing:
        # In training mode this router draws experts at random; in evaluation mode this number is
        # the width of its softmax.
        router.training = False
        router.train = partial(_unchanged, router)  # type: ignore[method-assign]
    for module in model.modules():
        if module in drawing:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _set_to_zero(module)
        if (config := getattr(module, "config", None)) is not None:
            _set_to_zero(config)


def _unchanged(router: nn.Module, mode: bool = True) -> nn.Module:
    return router


def _set_to_zero(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(owner, name, 0.0)


def stored_value_head(model: ModelOptions) -> Path | None:
    """The file of the value head that was saved with a model or its adapter, if any."""
    folders = [folder for folder in (model.adapter, model.path) if folder]
    files = [Path(folder) / f"{VALUE_HEAD}.safetensors" for folder in folders]
    return next((file for file in files if file.is_file()), None)


def read_value_head(head: ScalarHead, file: Path) -> None:
    """Sets the head's weights to those of a file with any dtype."""
    remedy = "Move the file away to start with a new head."
    with as_usage_error(f"{file}: not a value head of this model", remedy):
        weights = load_file(file)
        head.load_state_dict(weights)
        if odd := sorted(name for name, one in weights.items() if not one.isfinite().all()):
            raise ValueError(f"{odd[0]} has values that are NaN or infinite")


def value_head(model: Any) -> ScalarHead:
    """A head that gives a value for each last hidden state, in the model's dtype.

    It starts at zero: random values are not better, all ranks agree, and the first steps do not
    change the policy's hidden states.
    """
    output = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    width = output.in_features if isinstance(output, nn.Linear) else config.hidden_size
    device = model.get_input_embeddings().weight.device
    learning = (one.dtype for one in model.parameters() if one.requires_grad)
    head = ScalarHead(width, 1, device=device, dtype=next(learning, model.dtype))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
