"""Makes a folder with data, a tokenizer, and a small Llama that is trained for seconds."""

from __future__ import annotations

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
from .preferences import draw_preferences, make_data, transcript
from .tiny_tokenizer import make_tokenizer

BLOCK = 128  # tokens
BATCH = 16  # blocks
TRAINING_SEED = 7_002
PEAK_RATE = 6e-3
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model, and whether the head shares the weights of the embedding."""

    hidden_size: int = 96
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 256
    tied: bool = True


DEFAULT_SHAPE = ModelShape()


def make_world(folder: Path, *, rows: int = 2000, seed: int = 0, pretrain_steps: int = 80) -> None:
    """Makes model/, tokenizer/ and data/ in a new folder, which appears once it is complete."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder. Remove it, or choose another one.")
    building = fs.draft_of(folder.absolute())
    fs.make_folder(building)
    try:
        tokenizer = make_tokenizer(building / "tokenizer")
        make_model(building / "model", tokenizer, pretrain_steps=pretrain_steps, seed=seed)
        make_data(building / "data", rows=rows, seed=seed)
        fs.rename(building, folder)
    finally:
        fs.remove_tree(building)


def make_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    shape: ModelShape = DEFAULT_SHAPE,
    pretrain_steps: int = 80,
    seed: int = 0,
) -> None:
    """Pretrains a model and saves it with its tokenizer; with 0 steps its weights are random."""
    config = LlamaConfig(
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
    # With several threads, the last bits of sums would differ between machines.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
            if pretrain_steps:
                _pretrain(model, _blocks(tokenizer, pretrain_steps * BATCH, TRAINING_SEED))
    finally:
        torch.set_num_threads(threads)

    # Writes what `save_pretrained` of the model writes; that one imports DeepSpeed for seconds.
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (shape.tied and name == "lm_head.weight")
    }
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # safetensors' own `save_file` would make the file readable by its owner alone.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer.save_pretrained(folder)


def _blocks(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> Tensor:
    """Token ids of shape (count, BLOCK), packed from plain texts and conversations."""
    rng = Random(seed)
    ids: list[int] = []
    # A preference has at least 16 tokens, so these are always enough.
    for preference in draw_preferences(count * BLOCK // 16, seed=seed):
        answer = rng.choice(preference.answers).text
        if rng.random() < 0.3:
            prompt = transcript(preference.prompt)
            text = f"{tokenizer.bos_token}{prompt} {answer}{tokenizer.eos_token}"
        else:
            turn = {"role": "assistant", "content": answer}
            messages = [*map(dict, preference.prompt), turn]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        ids += tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) >= count * BLOCK:
            break
    return torch.tensor(ids[: count * BLOCK]).view(count, BLOCK)


def _pretrain(model: LlamaForCausalLM, blocks: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    batches = torch.split(blocks, BATCH)
    for step, batch in enumerate(batches):
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        rate = warm_up * (0.55 + 0.45 * cos(pi * step / len(batches)))
        optimizer.param_groups[0]["lr"] = PEAK_RATE * rate
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
