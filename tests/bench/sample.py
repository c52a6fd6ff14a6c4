"""Sampling in process beside plain `generate` for each prompt, and how often a batch changes it.

Both sides draw 8 samples of 64 tokens for each of 64 prompts of the tiny world, in one process, by
turns; nothing stops early, so both make the same number of tokens. Then the same samples are drawn
in batches of other sizes and in other numbers, and those that differ are counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

PROMPTS, SAMPLES, NEW_TOKENS, ROUNDS = 64, 8, 64, 3


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given.prompts, given.dtype, given.device)


def measure(folder: Path, count: int, dtype: str, device: str) -> None:
    """Times both sides and counts changed samples."""
    from align.pipeline.samplers import LocalSampler
    from align.schemas.config import ModelOptions, TokenOptions
    from align.stages.data.input_files import open_inputs
    from align.stages.data.prompt_rows import read_prompts
    from align.stages.demo.tiny_world import make_world
    from align.stages.model.load import load_causal_lm
    from align.stages.sample.prompts import asked_once

    world = make_world(folder / "world", rows=count * 2)
    options = ModelOptions(path=str(world.model), dtype=dtype, device=device)
    rows = read_prompts(open_inputs([str(world.data.paired)]), {})
    asked = list(asked_once(rows.prompts).by_key.values())[:count]
    local = LocalSampler(options, TokenOptions(), 16_384)
    ids = [local.ids_of(prompt) for prompt in asked]
    model = load_causal_lm(options)
    plain, shared = [], []
    for _ in range(ROUNDS):
        plain.append(timed(lambda: plain_generate(model, ids)))
        shared.append(timed(lambda: drawn(model, ids, range(SAMPLES))))
    print(f"{len(ids)} prompts, {SAMPLES} samples of {NEW_TOKENS} tokens each, {dtype}")
    print(f"generate for each prompt: {statistics.median(plain):.2f} s")
    print(f"align:                    {statistics.median(shared):.2f} s")
    print(f"ratio of the medians:     {statistics.median(plain) / statistics.median(shared):.2f}")
    print_changes(model, ids)


def timed(work) -> float:  # type: ignore[no-untyped-def]
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def plain_generate(model, ids) -> None:  # type: ignore[no-untyped-def]
    """What a loop over prompts does."""
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()
    how = GenerationConfig(
        do_sample=True, num_return_sequences=SAMPLES, max_new_tokens=NEW_TOKENS, top_k=0
    )
    for prompt in ids:
        tokens = torch.tensor([prompt], device=model.device)
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
        assert made.shape == (SAMPLES, len(prompt) + NEW_TOKENS)


def drawn(model, ids, numbers, *, rows: int = 0) -> dict[tuple[int, int], tuple[int, ...]]:  # type: ignore[no-untyped-def]
    """Samples by prompt and number, in batches of at most so many rows, or of 16,384 tokens."""
    from align.schemas.samples import Sampling
    from align.stages.model.generate import Generator, PromptTokens
    from align.stages.model.keyed_noise import stream_of

    tokens = rows * (max(map(len, ids)) + NEW_TOKENS) if rows else 16_384
    generator = Generator(model, Sampling(max_new_tokens=NEW_TOKENS), (), tokens_per_batch=tokens)
    asked = [
        PromptTokens(prompt, [stream_of(str(at), 0, number) for number in numbers])
        for at, prompt in enumerate(ids)
    ]
    return {
        (one.prompt, numbers[one.stream]): one.tokens
        for batch in generator.draw(asked)
        for one in batch
    }


def print_changes(model, ids) -> None:  # type: ignore[no-untyped-def]
    """How many samples differ from those of large batches."""
    few = ids[: max(1, len(ids) // 4)]
    whole = drawn(model, few, range(SAMPLES))
    for rows in (1, 3, 8):
        for count in (1, 4, 8):
            part = drawn(model, few, range(count), rows=rows)
            changed = sum(whole[key] != tokens for key, tokens in part.items())
            print(f"batches of {rows} rows, n = {count}: {changed} of {len(part)} samples differ")


if __name__ == "__main__":
    main()
