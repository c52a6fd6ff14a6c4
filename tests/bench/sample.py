"""Sampling in process beside plain `generate` for each prompt, and how often a batch changes it.

Both sides draw 8 samples of 64 tokens for each of 64 prompts of the tiny world, in one process, by
turns; nothing stops early, so both make the same number of tokens. Then the same samples are drawn
in batches of other sizes and in other numbers, and those that differ are counted.
"""

import statistics
import tempfile
import time
from pathlib import Path

import sides
import torch
from transformers import GenerationConfig

from align.pipeline.tables.samplers import LocalSampler
from align.schemas.config import ModelOptions
from align.schemas.data_options import TokenOptions
from align.schemas.samples import Sampling
from align.stages.data.files import open_inputs
from align.stages.data.records import read_prompts
from align.stages.demo.tiny_world import make_world
from align.stages.model.generate import Generator, PromptTokens
from align.stages.model.keyed_noise import stream_of
from align.stages.model.load import load_causal_lm
from align.stages.sample.sample_table import unique_prompts

SAMPLES, NEW_TOKENS, ROUNDS, BUDGET = 8, 64, 3, 16_384


def main():
    given = sides.options_of(__doc__, prompts=64, dtype="float32", device="auto")
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder) / "world", rows=given.prompts * 2)
        options = ModelOptions(path=str(world.model), dtype=given.dtype, device=given.device)
        rows = read_prompts(open_inputs([str(world.data.paired)]), {})
        asked = list(unique_prompts(rows.prompts).values())[: given.prompts]
        local = LocalSampler(options, TokenOptions(), BUDGET)
        ids, model = [local.ids_of(prompt) for prompt in asked], load_causal_lm(options)
    plain, shared = [], []
    for _ in range(ROUNDS):
        for seconds, draw in ((plain, plain_generate), (shared, drawn)):
            started = time.perf_counter()
            draw(model, ids)
            seconds.append(time.perf_counter() - started)
    theirs, ours = statistics.median(plain), statistics.median(shared)
    print(f"{len(ids)} prompts, {SAMPLES} samples of {NEW_TOKENS} tokens each, {given.dtype}")
    print(f"generate for each prompt: {theirs:.2f} s")
    print(f"align:                    {ours:.2f} s")
    print(f"ratio of the medians:     {theirs / ours:.2f}")
    print_changes(model, ids)


def plain_generate(model, ids):
    """What a loop over prompts does."""
    model.generation_config = GenerationConfig()
    how = GenerationConfig(
        do_sample=True, num_return_sequences=SAMPLES, max_new_tokens=NEW_TOKENS, top_k=0
    )
    for prompt in ids:
        tokens = torch.tensor([prompt], device=model.device)
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
        assert made.shape == (SAMPLES, len(prompt) + NEW_TOKENS)


def drawn(model, ids, count=SAMPLES, *, rows=0) -> dict[tuple[int, int], tuple[int, ...]]:
    """Samples by prompt and number, in batches of at most so many rows, or of 16,384 tokens."""
    tokens = rows * (max(map(len, ids)) + NEW_TOKENS) if rows else BUDGET
    generator = Generator(model, Sampling(max_new_tokens=NEW_TOKENS), (), tokens_per_batch=tokens)
    asked = [
        PromptTokens(prompt, [stream_of(str(at), 0, number) for number in range(count)])
        for at, prompt in enumerate(ids)
    ]
    return {
        (one.prompt, one.stream): one.tokens for batch in generator.draw(asked) for one in batch
    }


def print_changes(model, ids):
    """How many samples differ from those of large batches."""
    few = ids[: max(1, len(ids) // 4)]
    whole = drawn(model, few)
    for rows in (1, 3, 8):
        for count in (1, 4, 8):
            part = drawn(model, few, count, rows=rows)
            changed = sum(whole[key] != tokens for key, tokens in part.items())
            print(f"batches of {rows} rows, n = {count}: {changed} of {len(part)} samples differ")


if __name__ == "__main__":
    main()
