"""Training on one GPU: align beside TRL, in turn, in bfloat16, on random models of real sizes.

`small` has the shapes of a model of half a billion parameters, all of which are trained; `large`
those of one of eight billion, of which a LoRA adapter of every linear layer is trained, with
activations recomputed unless a side says otherwise. Pairs differ in length as real ones do. Both
sides take as many pairs in each AdamW step. Each run is a process of its own. Speed is that of the
median step after the first: loading, compiling and scoring the reference are left out, and stand
under "first step" and "whole"; the MFU of stage 1 has them in it. MFU counts every prompt and
completion once: 6 operations for each parameter and token, 4 where the weights are frozen, over
what the GPU is said to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from sides import (
    PAIRS_PER_STEP,
    Steps,
    ended,
    make_model,
    save_pairs,
    score,
    spread_length,
    tokens_of,
    train_with_align,
    train_with_trl,
)

DENSE_BF16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
MODELS = {
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 4, "kv": 2, "inner": 128, "vocab": 512},
    "small": {
        "hidden_size": 896,
        "layers": 24,
        "heads": 14,
        "kv": 2,
        "inner": 4864,
        "vocab": 151_936,
    },
    "large": {
        "hidden_size": 4096,
        "layers": 32,
        "heads": 32,
        "kv": 8,
        "inner": 14_336,
        "vocab": 128_256,
    },
}
# What differs from each side's own defaults.
ALIGN_SIDES = {
    "align": (),
    "align_kept": ("train.gradient_checkpointing=false", "train.tokens_per_batch=4096"),
}
TRL_SIDES = {
    "trl": {},
    "trl_kept": {"gradient_checkpointing": False},
    "trl_precomputed": {"precompute_ref_log_probs": True, "gradient_checkpointing": False},
    # cuDNN's attention plans each shape anew: a user who knows that switches it off.
    "trl_tuned": {
        "precompute_ref_log_probs": True,
        "gradient_checkpointing": False,
        "cudnn": False,
    },
    "trl_recomputing": {"precompute_ref_log_probs": True, "cudnn": False},
}
TITLES = {
    "align": "align",
    "align_kept": "align, keeping activations, 4k tokens",
    "trl": "TRL",
    "trl_kept": "TRL, keeping activations",
    "trl_precomputed": "TRL, precomputed, keeping activations",
    "trl_tuned": "TRL, the same without cuDNN",
    "trl_recomputing": "TRL, precomputed, without cuDNN",
    "stage1": "align, stage 1",
    "sweep": "align, stage 1 and a sweep of four",
}
FOUR_OF_TRL = "TRL, four runs: 4 x its fastest's whole"
# `sweep` is of DPO alone.
SIDES = {
    "tiny": ("align", "sweep", "trl_precomputed", "trl_tuned"),
    "small": ("align", "sweep", "trl", "trl_kept", "trl_precomputed", "trl_tuned"),
    "large": ("align", "align_kept", "trl", "trl_recomputing"),
}
EVERY = (*ALIGN_SIDES, *TRL_SIDES, "sweep")
USUAL = ("align", "sweep", "trl", "trl_tuned")  # what ten minutes are enough for
LEARNING_RATES = "1e-7,3e-7,1e-6,3e-6"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small", "large"])
    parser.add_argument("--methods", nargs="+", default=["dpo"])
    parser.add_argument("--sides", nargs="+", choices=EVERY, default=USUAL)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], help="a setting of align train")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing after these")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.folder, *options.one, options.set)))
        return
    ends = time.monotonic() + options.seconds
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, Path(folder), options, ends)


def compare(name, folder, options, ends):
    in_own_process(folder, "make", name, str(options.steps), [])
    facts = in_own_process(folder, "facts", name, "", [])
    print(f"{name}: {facts['parameters'] / 1e9:.2f} B parameters, {facts['device']}", flush=True)
    columns = ("tokens/s", "MFU %", "peak GiB", "first step s", "whole s")
    print(" " * 40 + "".join(f"{column:>13}" for column in columns), flush=True)
    sides = ["stage1", *(f"{m}/{s}" for m in options.methods for s in sides_of(name, m))]
    fastest, swept = None, False
    for side in sides:
        method, _, kind = side.rpartition("/")
        if kind not in options.sides and kind != "stage1":
            continue
        if time.monotonic() > ends:
            print(f"{side}: not run, the time is over", flush=True)
            continue
        told = in_own_process(folder, kind, name, method, options.set)
        if kind == "stage1":
            scored = told
        if kind == "sweep" and "whole" in told:
            swept = True
            told |= {"whole": scored["whole"] + told["whole"], "first": scored["first"]}
        print(line(f"{method} {TITLES[kind]}", told, facts, name), flush=True)
        if method == "dpo" and kind in TRL_SIDES and "whole" in told:
            fastest = min(fastest or told, told, key=lambda one: one["whole"])
    if swept and fastest:
        four = {"whole": 4 * fastest["whole"], "rate": None}
        print(line(f"dpo {FOUR_OF_TRL}", fastest | four, facts, name), flush=True)


def sides_of(name, method):
    precomputes = [side for side in TRL_SIDES if "precompute" in str(TRL_SIDES[side])]
    without = {"dpo": (), "kto": ("sweep",)}.get(method, ("sweep", *precomputes))
    return [side for side in SIDES[name] if side not in without]


def line(title, told, facts, name):
    if "failed" in told:
        return f"{title:40}{told['failed']}"
    operations = (4 if name == "large" else 6) if "stage" not in title else 2
    rate = told.get("rate")
    once = told.get("once_rate") or (rate and rate * facts["unique"] / facts["counted"])
    mfu = once and 100 * operations * facts["parameters"] * once / facts["operations"]
    cells = [
        f"{rate:13,.0f}" if rate else " " * 13,
        f"{mfu:13.1f}" if once else " " * 13,
        f"{told['peak_gib']:13.1f}",
        f"{told['first']:13.1f}",
        f"{told['whole']:13.1f}",
    ]
    return f"{title:40}{''.join(cells)}"


def in_own_process(folder, kind, name, method, sets):
    words = ("--folder", folder, "--one", kind, name, method, *(f"--set={one}" for one in sets))
    began = time.monotonic()
    done = ended(__file__, *words, ALIGN_HOME=str(folder / "home"), TOKENIZERS_PARALLELISM="0")
    if done.returncode:
        if kind in {"make", "facts"}:
            sys.exit(done.stderr)
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1]) | {"whole": time.monotonic() - began}


def run_one(folder, kind, name, method, sets):
    if kind == "make":
        return make(folder, MODELS[name], int(method))
    if kind == "facts":
        return facts_of(folder)
    if kind == "sweep":
        return sweep(folder, method, sets)
    if kind == "stage1":
        return stage_one(folder)
    if kind in ALIGN_SIDES:
        return train_align(folder, name, method, [*ALIGN_SIDES[kind], *sets])
    return train_trl(folder, name, method, TRL_SIDES[kind])


def make(folder, shape, steps):
    """A model folder of random weights, and pairs of random words."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    ties = shape["hidden_size"] < 2048
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        words = make_model(
            folder / "model",
            shape,
            shape["vocab"],
            max_position_embeddings=4096,
            tie_word_embeddings=ties,
            dtype="bfloat16",
        )
    save_pairs(folder / "pairs.parquet", words, steps * PAIRS_PER_STEP, spread_length)
    return {}


def facts_of(folder):
    """Parameters, tokens as a person counts pairs, tokens each counted once, the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    counted, unique = tokens_of(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "counted": counted,
        "unique": unique,
        "device": device,
        "operations": next((n for k, n in DENSE_BF16.items() if k in device), 1e12),
    }


def stage_one(folder):
    """Scores the pairs and their mismatched ones into a cache; the rate counts each token once."""
    began = time.perf_counter()
    flags = {
        "model.path": str(folder / "model"),
        "data.files": [str(folder / "pairs.parquet")],
        "cache.output": str(folder / "cache"),
    }
    outcome, _ = score(flags, progress=Steps())
    tally = outcome.tally
    return {
        "once_rate": (tally.tokens - tally.padding) / tally.seconds,
        "peak_gib": peak_gib(),
        "first": time.perf_counter() - began - tally.seconds,
    }


def sweep(folder, method, sets):
    """Trains at four learning rates from one cache."""
    from align.pipeline.terminal import own_process

    own_process([])
    from align.cli import app

    flags = ["--method", method, "--cache", folder / "cache", "--lr", LEARNING_RATES]
    flags += ["--output", folder / "sweep", "--set", f"train.batch_size={PAIRS_PER_STEP}"]
    flags += [part for one in ("tracking.mlflow=false", *sets) for part in ("--set", one)]
    app(["sweep", *map(str, flags)], standalone_mode=False)
    return {"peak_gib": peak_gib()}


def result(folder, steps):
    counted, _ = tokens_of(folder)
    ends = [end for end, _ in steps.ends]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    rate = counted / len(ends) / statistics.median(seconds)
    return {"rate": rate, "first": ends[0] - steps.began, "peak_gib": peak_gib()}


def peak_gib():
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def train_align(folder, name, method, sets):
    steps = Steps()
    of_large = {"lora.enabled": True, "train.gradient_checkpointing": True}
    train_with_align(folder, method, steps, sets, **(of_large if name == "large" else {}))
    return result(folder, steps)


def train_trl(folder, name, method, settings):
    steps = Steps()
    import torch

    settings = {"bf16": torch.cuda.is_available(), **settings}
    torch.backends.cuda.enable_cudnn_sdp(settings.pop("cudnn", True))
    more = {}
    if name == "large":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    train_with_trl(folder, method, steps, settings, model={"dtype": torch.bfloat16}, **more)
    return result(folder, steps)


if __name__ == "__main__":
    main()
