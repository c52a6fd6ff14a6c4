"""Shared by the instruments: worlds, processes, clocks, tables, and the trainers of both sides."""

import argparse
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

VOCABULARY = 16_384
SPECIALS = ["<s>", "</s>", "<pad>"]
PAIRS_PER_STEP = 32
ON_CPU = {"use_cpu": True, "bf16": False}  # settings of TRL
CALL = """
import json, sys
sys.path.insert(0, {0!r})
import {1} as script
print(json.dumps(script.{2}(*json.loads(sys.argv[1]))))
"""


def options_of(doc, **defaults):
    """The options of an instrument by name and default; a tuple lists the choices."""
    parser = argparse.ArgumentParser(description=doc)
    for name, default in defaults.items():
        how = {"type": Path if default is None else type(default)}
        if isinstance(default, tuple):
            how = {"nargs": "+", "choices": default}
        elif isinstance(default, list):
            how = {"nargs": "+"} if default else {"action": "append"}
        elif isinstance(default, bool):
            how = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    return parser.parse_args()


def called(function, *arguments, **environment):
    """Calls a function of a script in a process of its own; a failure ends the program."""
    figures, failed = tried(function, *arguments, **environment)
    return figures if not failed else sys.exit(failed)


def tried(function, *arguments, **environment):
    """Returns the result of such a call, and its error output if it failed."""
    script = Path(inspect.getfile(function)).resolve()
    code = CALL.format(str(script.parent), script.stem, function.__name__)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments, default=str)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return None, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), ""


def took(words, folder, *, limit=threading.TIMEOUT_MAX, **environment):
    """Seconds of a Python in a folder that ends well or at the limit, and its peak in MiB."""
    begun = time.perf_counter()
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=folder,
            env=os.environ | environment,
            stdout=said,
            stderr=said,
        )
        alarm = threading.Timer(limit, process.kill)
        alarm.start()
        _, status, used = os.wait4(process.pid, 0)
        alarm.cancel()
    seconds = min(limit, time.perf_counter() - begun)
    if status and seconds < limit:
        sys.exit((folder / "said").read_text())
    return seconds, used.ru_maxrss / 1024


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
        for head, figure, width, decimals in columns:
            own = statistics.median(one[side][figure] for one in rounds)
            cells.append(f"{own:{width},.{2 if head.endswith(' s') else 0}f}")
            if decimals:
                ratios = (one["align"][figure] / one[side][figure] for one in rounds)
                cells.append(f"{statistics.median(ratios):9.{decimals}f}x")
        print(f"{titles[side]:26}{''.join(cells)}", flush=True)


def make_case(folder, rows, lengths="even"):
    """A tiny Llama and pairs of random words, as many as `LENGTHS` draws."""
    words = make_model(folder / "model", (128, 4, 4, 2, 344), VOCABULARY)
    save_pairs(folder / "pairs.parquet", words, rows, lengths)


SHAPE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "intermediate_size",
)


def make_model(folder, shape, vocabulary, **more):
    """A Llama of random weights and its tokenizer; returns the words of the vocabulary."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    words = [*SPECIALS, *(f"w{index}" for index in range(vocabulary - len(SPECIALS)))]
    known = {word: index for index, word in enumerate(words)}
    level = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_tokenizer(folder, level)
    torch.manual_seed(0)
    more |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "vocab_size": vocabulary}
    config = LlamaConfig(**dict(zip(SHAPE, shape, strict=True)), **more)
    LlamaForCausalLM(config).save_pretrained(folder)
    return words


def save_tokenizer(folder, tokenizer):
    from transformers import PreTrainedTokenizerFast

    specials = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)


def save_pairs(path, words, rows, lengths):
    """Preference pairs of random words."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)

    def text(column):
        picks = random.integers(len(SPECIALS), len(words), LENGTHS[lengths](random, column))
        return " ".join(words[pick] for pick in picks)

    columns = {name: [text(name) for _ in range(rows)] for name in ("prompt", "chosen", "rejected")}
    for name in ("chosen", "rejected"):
        columns[name] = [f" {completion}" for completion in columns[name]]
    pq.write_table(pa.table(columns), path)


def spread_length(random, column):
    """Log-normal, with the spread of AlpacaEval's pairs (log-lengths deviate by .86 to 1.06).

    Cut so that no pair is over 1,024 tokens, TRL's limit.
    """
    median, most = (25, 200) if column == "prompt" else (250, 800)
    return min(most, max(1, round(random.lognormal(math.log(median), 0.9))))


LENGTHS = {
    "even": lambda random, _: random.integers(150, 251),
    "short": lambda random, _: random.integers(3, 31),
    "spread": spread_length,
}


def tokens_of(folder):
    """Tokens of all pairs: with the prompt in both sides, and with the prompt once."""
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / "pairs.parquet").to_pylist()
    prompts = sum(len(row["prompt"].split()) for row in rows)
    completions = sum(len(row[name].split()) for row in rows for name in ("chosen", "rejected"))
    return 2 * prompts + completions, prompts + completions


def peak_mib():
    """Not ru_maxrss, which begins with the peak of the process that started this one."""
    return memory_mib("VmHWM")


def memory_mib(name):
    """A line of this process's status."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) / 1024


class Steps:
    """When each step of a trainer ended, by the wall clock and the CPU's."""

    def __init__(self):
        self.began = time.perf_counter()
        self.started = 0.0
        self.ends = []
        self.losses = []

    def begin(self, *_, **__):
        self.started = self.started or time.perf_counter()

    def advance(self, *_, **__):
        synchronize()
        self.ends.append((time.perf_counter(), time.process_time()))

    def log(self, _):
        pass

    def end(self):
        pass


def synchronize():
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def as_a_command():
    """Does what a command does before it imports anything else."""
    from align.cli import own_process

    own_process([])


def score(folder, cache, more=None, *, reference=None, progress=None):
    """Stage 1 over the pairs of a folder; returns its outcome, and seconds without imports."""
    as_a_command()
    from align.pipeline.commands.terminal import begin_work
    from align.pipeline.options.settings import load_settings
    from align.pipeline.precompute.precompute import precompute

    flags = {
        "model.path": str(folder / "model"),
        "data.files": [str(folder / "pairs.parquet")],
        "cache.output": str(cache),
        "cache.reuse_known": False,
        "tracking.mlflow": False,
    }
    config = load_settings(flags | (more or {}), [], file=None).config
    if reference is None:
        from align.stages.model.reference import HfReference

        reference = HfReference(config.model)
    shown = begin_work()
    started = time.perf_counter()
    outcome = precompute(config, reference, progress=progress or shown)
    return outcome, time.perf_counter() - started


def training_settings(folder, output, method, sets, flags):
    """The settings of a training on the cache of a folder."""
    from align.pipeline.options.settings import load_settings

    own = {
        "train.method": method,
        "train.cache": f"{folder}/cache",
        "train.output": str(output),
        "train.batch_size": PAIRS_PER_STEP,
        "tracking.mlflow": False,
    }
    return load_settings(own | flags, sets, file=None)


def train_with_align(folder, method, steps, sets, **more):
    """Trains on the cache of a folder, from settings."""
    as_a_command()
    with tempfile.TemporaryDirectory() as output:
        from align.pipeline.train.setup import check

        run = check(training_settings(folder, f"{output}/run", method, sets, more))

        from align.pipeline.commands.terminal import begin_work
        from align.pipeline.train.train import train

        begin_work()
        train(run, progress=steps)


def train_with_trl(folder, method, steps, settings, *, model=None, reference=None, **more):
    """TRL's trainer over the pairs of a folder, by its defaults but for `settings`.

    `reference` is a `CachedReference`.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, *_, **__):
            steps.begin()

        def on_step_end(self, *_, **__):
            steps.advance()

        def on_log(self, *_, logs, **__):
            steps.losses += [logs["loss"]] if "loss" in logs else []

    with tempfile.TemporaryDirectory() as output:
        data = Dataset.from_parquet(str(folder / "pairs.parquet"), cache_dir=output)
        trainer_class, config_class, data, rows = trl_classes(method, data)
        settings = {"per_device_train_batch_size": 8} | settings
        arguments = config_class(
            output_dir=output,
            gradient_accumulation_steps=rows // settings["per_device_train_batch_size"],
            num_train_epochs=1,
            save_strategy="no",
            report_to="none",
            **settings,
        )
        made = partial(reference.trainer, trainer_class) if reference else trainer_class
        trainer = made(
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
