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

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import sides

DENSE_BF16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
# A model, and the size of its vocabulary.
MODELS = {
    "tiny": ((64, 2, 4, 2, 128), 512),
    "small": ((896, 24, 14, 2, 4864), 151_936),
    "large": ((4096, 32, 32, 8, 14_336), 128_256),
}
KEPT, PRECOMPUTED = {"gradient_checkpointing": False}, {"precompute_ref_log_probs": True}
SMALL_BATCH = ("train.gradient_checkpointing=false", "train.tokens_per_batch=4096")
# Titles, and what differs from each side's own defaults: settings of align, or of TRL.
ALL_SIDES = {
    "align": ("align", ()),
    "align_kept": ("align, keeping activations, 4k tokens", SMALL_BATCH),
    "trl": ("TRL", {}),
    "trl_kept": ("TRL, keeping activations", KEPT),
    "trl_precomputed": ("TRL, precomputed, keeping activations", PRECOMPUTED | KEPT),
    # cuDNN's attention plans each shape anew: a user who knows that switches it off.
    "trl_tuned": ("TRL, the same without cuDNN", PRECOMPUTED | KEPT | {"cudnn": False}),
    "trl_recomputing": ("TRL, precomputed, without cuDNN", PRECOMPUTED | {"cudnn": False}),
    "stage1": ("align, stage 1", ()),
    "sweep": ("align, stage 1 and a sweep of four", ()),
}
FOUR_OF_TRL = "TRL, four runs: 4 x its fastest's whole"
# `sweep` is of DPO alone.
SIDES = {
    "tiny": ("align", "sweep", "trl_precomputed", "trl_tuned"),
    "small": ("align", "sweep", "trl", "trl_kept", "trl_precomputed", "trl_tuned"),
    "large": ("align", "align_kept", "trl", "trl_recomputing"),
}
USUAL = ("align", "sweep", "trl", "trl_tuned")  # what ten minutes are enough for
LEARNING_RATES = "1e-7,3e-7,1e-6,3e-6"
COLUMNS = ("tokens/s", "MFU %", "peak GiB", "first step s", "whole s")


def main():
    options = sides.options_of(
        __doc__,
        models=["small", "large"],
        methods=["dpo"],
        sides=[*USUAL],
        steps=8,
        set=[],  # settings of align train
        seconds=540.0,  # begin nothing after these
    )
    ends = time.monotonic() + options.seconds
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, folder, options, ends)


def compare(name, folder, options, ends):
    sides.called(make, folder, name, options.steps)
    facts = sides.called(facts_of, folder)
    print(f"{name}: {facts['parameters'] / 1e9:.2f} B parameters, {facts['device']}", flush=True)
    print(" " * 40 + "".join(f"{column:>13}" for column in COLUMNS), flush=True)
    told = {}
    kinds = {"stage1", *options.sides}
    planned = [("", "stage1"), *((m, s) for m in options.methods for s in sides_of(name, m))]
    for method, kind in (one for one in planned if one[1] in kinds):
        if time.monotonic() > ends:
            print(f"{method}/{kind}: not run, the time is over".lstrip("/"), flush=True)
            continue
        found = told[method, kind] = told_by(folder, name, method, kind, options.set)
        if kind == "sweep" and "whole" in found:
            scored = told["", "stage1"]
            found |= {"whole": scored["whole"] + found["whole"], "first": scored["first"]}
        print(line(f"{method} {ALL_SIDES[kind][0]}", found, facts, name), flush=True)
    runs = [one for (method, kind), one in told.items() if method == "dpo" and "trl" in kind]
    fastest = min((one for one in runs if "whole" in one), key=lambda one: one["whole"], default=0)
    if fastest and any(kind == "sweep" and "whole" in one for (_, kind), one in told.items()):
        four = {"whole": 4 * fastest["whole"], "rate": None}
        print(line(f"dpo {FOUR_OF_TRL}", fastest | four, facts, name), flush=True)


def sides_of(name, method):
    precomputes = [side for side, (title, _) in ALL_SIDES.items() if "precomputed" in title]
    without = {"dpo": (), "kto": ("sweep",)}.get(method, ("sweep", *precomputes))
    return [side for side in SIDES[name] if side not in without]


def told_by(folder, name, method, kind, sets):
    """What one side tells, in a process of its own, and how long that took."""
    began = time.monotonic()
    home = {"ALIGN_HOME": f"{folder}/home", "TOKENIZERS_PARALLELISM": "0"}
    told, failed = sides.tried(measure, folder, name, method, kind, sets, **home)
    if failed:
        return {"failed": failed.strip().splitlines()[-1][:300]}
    return told | {"whole": time.monotonic() - began}


def line(title, told, facts, name):
    if "failed" in told:
        return f"{title:40}{told['failed']}"
    operations = (4 if name == "large" else 6) if "stage" not in title else 2
    rate = told.get("rate")
    once = told.get("once_rate") or (rate and rate * facts["unique"] / facts["counted"])
    mfu = once and 100 * operations * facts["parameters"] * once / facts["operations"]
    cells = [f"{rate:13,.0f}" if rate else " " * 13, f"{mfu:13.1f}" if once else " " * 13]
    cells += [f"{told[figure]:13.1f}" for figure in ("peak_gib", "first", "whole")]
    return f"{title:40}{''.join(cells)}"


def make(folder, name, steps):
    """A model folder of random weights, and pairs of random words."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    shape, vocabulary = MODELS[name]
    more = {"max_position_embeddings": 4096, "dtype": "bfloat16"}
    more["tie_word_embeddings"] = name != "large"
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        words = sides.make_model(Path(folder) / "model", shape, vocabulary, **more)
    pairs = Path(folder) / "pairs.parquet"
    sides.save_pairs(pairs, words, steps * sides.PAIRS_PER_STEP, "spread")


def facts_of(folder):
    """Parameters, tokens as a person counts pairs, tokens each counted once, the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    counted, unique = sides.tokens_of(Path(folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{folder}/model"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "counted": counted,
        "unique": unique,
        "device": device,
        "operations": next((n for k, n in DENSE_BF16.items() if k in device), 1e12),
    }


def measure(folder, name, method, kind, sets):
    """What one process tells of one side."""
    folder = Path(folder)
    if kind == "stage1":
        return stage_one(folder) | {"peak_gib": peak_gib()}
    if kind == "sweep":
        sweep(folder, method, sets)
        return {"peak_gib": peak_gib()}
    steps, (_, own) = sides.Steps(), ALL_SIDES[kind]
    if "align" in kind:
        of_large = {"lora.enabled": True, "train.gradient_checkpointing": True}
        more = of_large if name == "large" else {}
        sides.train_with_align(folder, method, steps, [*own, *sets], **more)
    else:
        train_with_trl(folder, name, method, steps, own)
    counted, _ = sides.tokens_of(folder)
    ends = [end for end, _ in steps.ends]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    rate = counted / len(ends) / statistics.median(seconds)
    return {"rate": rate, "first": ends[0] - steps.began, "peak_gib": peak_gib()}


def stage_one(folder):
    """Scores the pairs and their mismatched ones into a cache; the rate counts each token once."""
    began = time.perf_counter()
    tally = sides.score(folder, folder / "cache", progress=sides.Steps())[0].tally
    return {
        "once_rate": (tally.tokens - tally.padding) / tally.seconds,
        "first": time.perf_counter() - began - tally.seconds,
    }


def sweep(folder, method, sets):
    """Trains at four learning rates from one cache."""
    sides.as_a_command()
    from align.cli import app

    words = ["--method", method, "--cache", folder / "cache", "--lr", LEARNING_RATES]
    words += ["--output", folder / "sweep", "--set", f"train.batch_size={sides.PAIRS_PER_STEP}"]
    words += [part for one in ("tracking.mlflow=false", *sets) for part in ("--set", one)]
    app(["sweep", *map(str, words)], standalone_mode=False)


def peak_gib():
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def train_with_trl(folder, name, method, steps, settings):
    import torch

    settings = {"bf16": torch.cuda.is_available(), **settings}
    torch.backends.cuda.enable_cudnn_sdp(settings.pop("cudnn", True))
    more = {}
    if name == "large":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    dtype = {"dtype": torch.bfloat16}
    sides.train_with_trl(folder, method, steps, settings, model=dtype, **more)


if __name__ == "__main__":
    main()
