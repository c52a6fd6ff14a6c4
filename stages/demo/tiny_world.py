"""A tiny world in one folder: data, a tokenizer, and a Llama trained for a few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ...schemas.errors import UsageError
from ..storage.disk import fs
from .preferences import DataFiles, Preference, draw_preferences, make_data, transcript
from .tiny_tokenizer import make_tokenizer


@dataclass(frozen=True)
class ModelShape:
    """The width and depth of the model, and whether the head is tied to the embedding."""

    hidden_size: int = 96
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 256
    tied: bool = True


DEFAULT_SHAPE = ModelShape()


@dataclass(frozen=True)
class TinyWorld:
    """The paths of a tiny world, and the log-probs of its model before and after pretraining."""

    folder: Path
    model: Path  # weights, config, generation config and tokenizer
    tokenizer: Path  # the tokenizer alone
    data: DataFiles
    pretraining: Pretraining


def make_world(
    folder: Path,
    *,
    rows: int = 2000,
    seed: int = 0,
    shape: ModelShape = DEFAULT_SHAPE,
    pretrain_steps: int = 80,
) -> TinyWorld:
    """A world in a new folder, which is created atomically."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty. Remove it, or name another folder.")
    building = fs.draft_of(folder.absolute())
    fs.make_folder(building)
    try:
        tokenizer = make_tokenizer(building / "tokenizer")
        pretraining = make_model(
            building / "model", tokenizer, shape=shape, pretrain_steps=pretrain_steps, seed=seed
        )
        make_data(building / "data", rows=rows, seed=seed)
        fs.rename(building, folder)
    finally:
        fs.remove_tree(building)
    return TinyWorld(
        folder=folder,
        model=folder / "model",
        tokenizer=folder / "tokenizer",
        data=DataFiles.under(folder / "data"),
        pretraining=pretraining,
    )


_BLOCK = 128  # tokens
_BATCH = 16  # blocks
_HELD_OUT_BLOCKS = 16
_TRAINING_SEED = 7_002
_HELD_OUT_SEED = 7_003
_PEAK_RATE = 6e-3
_WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Pretraining:
    """Mean log-prob per token of held-out text, before and after."""

    logp_before: float
    logp_after: float
    num_parameters: int


def make_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    shape: ModelShape = DEFAULT_SHAPE,
    pretrain_steps: int = 80,
    seed: int = 0,
) -> Pretraining:
    """Pretrains a model and saves it with its tokenizer; 0 steps leave it random."""
    with _repeatable(seed):
        model = LlamaForCausalLM(_config(tokenizer, shape))
        held_out = _blocks(tokenizer, _HELD_OUT_BLOCKS, _HELD_OUT_SEED)
        before = _mean_logp(model, held_out)
        if pretrain_steps:
            _pretrain(model, _blocks(tokenizer, pretrain_steps * _BATCH, _TRAINING_SEED))
        after = _mean_logp(model, held_out) if pretrain_steps else before
    _save(model, folder)
    tokenizer.save_pretrained(folder)
    return Pretraining(before, after, model.num_parameters())


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes what `save_pretrained` writes, without importing DeepSpeed, which takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.config.tie_word_embeddings
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # safetensors itself makes the file readable for its owner only.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    # Sums over several threads differ in their last bits between machines.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _config(tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=shape.tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _blocks(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> Tensor:
    """Texts packed into token ids: (count, _BLOCK)."""
    rng = Random(seed)
    ids: list[int] = []
    # At least 16 tokens a preference: there is always enough to draw.
    for preference in draw_preferences(count * _BLOCK // 16, seed=seed):
        ids += tokenizer(_as_text(tokenizer, preference, rng), add_special_tokens=False).input_ids
        if len(ids) >= count * _BLOCK:
            break
    return torch.tensor(ids[: count * _BLOCK]).view(count, _BLOCK)


def _as_text(tokenizer: PreTrainedTokenizerFast, preference: Preference, rng: Random) -> str:
    answer = rng.choice(preference.answers).text
    if rng.random() < 0.3:
        text = transcript(preference.prompt)
        return f"{tokenizer.bos_token}{text} {answer}{tokenizer.eos_token}"
    messages = [*map(dict, preference.prompt), {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _pretrain(model: LlamaForCausalLM, blocks: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, weight_decay=0.01)
    batches = torch.split(blocks, _BATCH)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = _PEAK_RATE * _rate(step, len(batches))
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _rate(step: int, steps: int) -> float:
    warm_up = min(1.0, (step + 1) / _WARM_UP_STEPS)
    return warm_up * (0.55 + 0.45 * cos(pi * step / steps))


@torch.no_grad()
def _mean_logp(model: LlamaForCausalLM, blocks: Tensor) -> float:
    return -float(model(input_ids=blocks, labels=blocks, use_cache=False).loss)
