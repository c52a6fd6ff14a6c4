"""What comparisons share: a model and its pairs, the processes of both sides, their clocks."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY = 16_384
SPECIALS = ["<s>", "</s>", "<pad>"]
PAIRS_PER_STEP = 32


def told_by(script, *words, **environment):
    """What a script prints last, as JSON, in a process of its own; one that fails ends it all."""
    done = ended(script, *words, **environment)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def ended(script, *words, **environment):
    """A script's process at its end."""
    return subprocess.run(
        [sys.executable, script, *map(str, words)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def report(rounds, titles, columns):
    """A table of the sides' medians, and of the medians of the rounds' own ratios to align.

    `columns` are a heading, the name of a figure, its width, and the decimals of its ratio, if any.
    """
    print(f"medians of {len(rounds)} rounds; ratios are medians of the rounds' own ratios")
    heads = [
        f"{head:>{width}}" + (f"{'align is':>10}" if decimals else "")
        for head, _, width, decimals in columns
    ]
    print(" " * 26 + "".join(heads))
    for side in (name for name in rounds[0] if name in titles):
        cells = []
        for _, figure, width, decimals in columns:
            own = statistics.median(told[side][figure] for told in rounds)
            cells.append(f"{own:{width},.{1 if figure == 'start' else 0}f}")
            if decimals:
                ratios = (told["align"][figure] / told[side][figure] for told in rounds)
                cells.append(f"{statistics.median(ratios):9.{decimals}f}x")
        print(f"{titles[side]:26}{''.join(cells)}", flush=True)


def make_case(folder, rows, lengths="even"):
    """A tiny Llama and pairs of random words, their numbers drawn as `LENGTHS` says."""
    shape = {"hidden_size": 128, "layers": 4, "heads": 4, "kv": 2, "inner": 344}
    words = make_model(folder / "model", shape, VOCABULARY, max_position_embeddings=2048)
    save_pairs(folder / "pairs.parquet", words, rows, LENGTHS[lengths])


def make_model(folder, shape, vocabulary, **more):
    """A Llama of random weights and a tokenizer of so many words, which are returned."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    words = [*SPECIALS, *(f"w{index}" for index in range(vocabulary - len(SPECIALS)))]
    known = {word: index for index, word in enumerate(words)}
    level = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_tokenizer(folder, level)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return words


def save_tokenizer(folder, tokenizer):
    from transformers import PreTrainedTokenizerFast

    specials = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)


def save_pairs(path, words, rows, length_of):
    """Preference pairs of random words."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)

    def text(column):
        picks = random.integers(len(SPECIALS), len(words), length_of(random, column))
        return " ".join(words[pick] for pick in picks)

    columns = {name: [text(name) for _ in range(rows)] for name in ("prompt", "chosen", "rejected")}
    for name in ("chosen", "rejected"):
        columns[name] = [f" {completion}" for completion in columns[name]]
    pq.write_table(pa.table(columns), path)


def even_length(random, _):
    return random.integers(150, 251)


def spread_length(random, column):
    """Log-normal, with the spread of AlpacaEval's pairs (log-lengths deviate by .86 to 1.06).

    Cut so that no pair is over 1,024 tokens, TRL's limit.
    """
    median, most = (25, 200) if column == "prompt" else (250, 800)
    return min(most, max(1, round(random.lognormal(math.log(median), 0.9))))


LENGTHS = {"even": even_length, "spread": spread_length}


def tokens_of(folder):
    """Tokens as a person counts pairs, prompt and completion for each, and counted once each."""
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / "pairs.parquet").to_pylist()
    prompts = sum(len(row["prompt"].split()) for row in rows)
    completions = sum(len(row[name].split()) for row in rows for name in ("chosen", "rejected"))
    return 2 * prompts + completions, prompts + completions


def peak_mib():
    """Not ru_maxrss, which begins with the peak of the process that started this one."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


class Steps:
    """What a trainer tells of its progress, as times: of the wall, and of the CPU."""

    def __init__(self):
        self.began = time.perf_counter()
        self.started = 0.0
        self.ends = []

    def begin(self, *_, **__):
        self.started = self.started or time.perf_counter()

    def advance(self, *_, **__):
        synchronize()
        self.ends.append((time.perf_counter(), time.process_time()))

    def say(self, _):
        pass

    def end(self):
        pass


def synchronize():
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def score(flags, *, reference=None, progress=None):
    """Stage 1 as the command runs it; returns its outcome, and seconds without imports."""
    from align.pipeline.terminal import own_process

    own_process([])  # as the command does before anything else
    from align.pipeline.precompute import precompute
    from align.pipeline.settings import load_settings
    from align.pipeline.terminal import begin_work

    quiet = {"cache.reuse_known": False, "tracking.mlflow": False}
    config = load_settings(flags | quiet, [], file=None).config
    if reference is None:
        from align.stages.model.reference import HfReference

        reference = HfReference(config.model)
    shown = begin_work()
    started = time.perf_counter()
    outcome = precompute(config, reference, progress=progress or shown)
    return outcome, time.perf_counter() - started


def train_with_align(folder, method, steps, sets, **more):
    """Trains on the cache of a folder, from settings."""
    from align.pipeline.terminal import own_process

    own_process([])
    from align.pipeline.settings import load_settings
    from align.pipeline.training_job import open_training

    with tempfile.TemporaryDirectory() as output:
        flags = {
            "train.method": method,
            "train.cache": str(folder / "cache"),
            "train.output": f"{output}/run",
            "train.batch_size": PAIRS_PER_STEP,
            "tracking.mlflow": False,
        }
        job = open_training(load_settings(flags | more, sets, file=None))

        from align.pipeline.terminal import begin_work
        from align.pipeline.train import run_training

        begin_work()
        run_training(job, progress=steps)


def train_with_trl(folder, method, steps, settings, *, model=None, **more):
    """TRL's trainer over the pairs of a folder, by its defaults but for `settings`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, *_, **__):
            steps.begin()

        def on_step_end(self, *_, **__):
            steps.advance()

    with tempfile.TemporaryDirectory() as output:
        data = Dataset.from_parquet(str(folder / "pairs.parquet"), cache_dir=output)
        trainer_class, config_class, data, rows = trl_classes(method, data)
        batch = settings.get("per_device_train_batch_size", 8)
        arguments = config_class(
            output_dir=output,
            gradient_accumulation_steps=rows // batch,
            num_train_epochs=1,
            save_strategy="no",
            report_to="none",
            **{"per_device_train_batch_size": batch} | settings,
        )
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", **model or {}),
            args=arguments,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            callbacks=[Callback()],
            **more,
        )
        trainer.train()
        trainer.save_model(f"{output}/model")


def trl_classes(method, data):
    """A trainer, its settings' class, its data and the rows of a step: KTO's are completions."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, unpair_preference_dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    classes = {
        "dpo": (DPOTrainer, DPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
    }
    if method == "kto":
        data = unpair_preference_dataset(data).shuffle(seed=0)
        return *classes[method], data, 2 * PAIRS_PER_STEP
    return *classes[method], data, PAIRS_PER_STEP
