"""What one GPU measures: align beside TRL, in bfloat16, in one table (`make bench-gpu`).

    python tests/bench/gpu.py [PART ...]

A part is named by its beginning (`small`, `large/dpo`); without names all of them run. Figures are
also in bench-results/gpu.json. Without a GPU a tiny model tries the parts on the CPU.

`small` has the shapes of a model of half a billion parameters, all of which are trained; `large`
those of one of eight billion, of which a LoRA adapter of every linear layer is trained, and in
`full` all weights. Weights are random. Pairs differ in length as real ones do. Both sides take as
many pairs in each AdamW step. Speed is that of the median step after the first: loading, compiling
and scoring the reference are left out, and stand under "first step". MFU counts every prompt and
completion once: 6 operations for each parameter and token, 4 where the weights are frozen, 2 in
stage 1, divided by the peak that the GPU's maker states.
"""

import gc
import importlib.util
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import sides

sys.path.append(str(Path(__file__).parents[1]))  # support
RESULTS = Path(__file__).parents[2] / "bench-results"
DENSE_BF16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
# A model, and the size of its vocabulary.
MODELS = {
    "tiny": ((64, 2, 4, 2, 128), 512),
    "small": ((896, 24, 14, 2, 4864), 151_936),
    "large": ((4096, 32, 32, 8, 14_336), 128_256),
}
STEPS = 8
LEARNING_RATES = "1e-7,3e-7,1e-6,3e-6"
# Steps of a profile: kernels are compiled, then one is profiled, then waits of one are counted.
WARM, LAST = 2, 4
# The head's own operations are known by the function that calls them, forward and backward.
HEAD = re.compile("FusedLogps")
ATTENTION = re.compile("attention|attn|flash|fmha|triton_tem|flex|softmax", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|cutlass|nvjet|cublas|wgmma|matmul|::b?mm\b|::addmm|::baddbmm|triton_mm")
KINDS = {
    "products": "matrix products of the layers",
    "attention": "attention",
    "head": "the output head, forward and backward",
    "between": "what lies between products",
}


def main(names):
    """Measures the named parts, each in a process of its own, and prints the table of them."""
    chosen = [part for part in PARTS if not names or part.startswith(tuple(names))]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        stages = {f"{shape_of(part)}/stage1" for part in chosen}
        for part in (one for one in PARTS if one in stages or one in chosen):
            function, *given = PARTS[part]
            if not on_gpu():
                given = [without_gpu(one) for one in given]
            figures, failed = sides.tried(function, f"{folder}/{shape_of(part)}", *given)
            found[part] = figures or {"failed": failed.strip().rpartition("\n")[2]}
            print(f"{part}: {found[part]}", file=sys.stderr, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu.json").write_text(json.dumps({"on": device(), "parts": found}, indent=1))
    print(f"On {device()}:\n\n| | {' | '.join(TABLE)} |\n|---{'|---' * len(TABLE)}|")
    for part, figures in found.items():
        forms = TABLE.values()
        cells = [form.format(figures[name]) if figures.get(name) else "" for name, form in forms]
        print(f"| {part} | {' | '.join(cells)} |")


def shape_of(part):
    return "small" if part.startswith("small") else "large"  # `full` trains the large one too


def without_gpu(given):
    """Settings without what only a GPU can do, or does fast."""
    slow = (*IN_BFLOAT16, *OFFLOADED)
    return [one for one in given if one not in slow] if isinstance(given, tuple) else given


def device():
    import torch

    return torch.cuda.get_device_name() if on_gpu() else "a CPU, with a tiny model"


def on_gpu():
    import torch

    return torch.cuda.is_available()


def made(folder, shape):
    """A model of random weights, drawn where they are fast to draw, and pairs of random words."""
    import torch

    folder = Path(folder)
    is_tiny = not on_gpu()
    sizes, vocabulary = MODELS["tiny" if is_tiny else shape]
    dtype = "float32" if is_tiny else "bfloat16"  # a CPU is slow in it
    more = {"max_position_embeddings": 4096, "dtype": dtype}
    more["tie_word_embeddings"] = shape != "large"
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda" if on_gpu() else "cpu"):
        words = sides.make_model(folder / "model", sizes, vocabulary, **more)
    torch.set_default_dtype(torch.float32)
    if on_gpu():
        gc.collect()  # a model may be in a cycle, and stage 1 is measured next
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows = (LAST if is_tiny else STEPS) * sides.PAIRS_PER_STEP
    lengths = "short" if is_tiny else "spread"
    sides.save_pairs(folder / "pairs.parquet", words, rows, lengths)


def mfu(folder, once_rate, operations):
    """The percentage of the stated peak of this GPU; None where no peak is stated."""
    import torch

    name = torch.cuda.get_device_name() if on_gpu() else ""
    most = next((flops for known, flops in DENSE_BF16.items() if known in name), None)
    return most and 100 * operations * parameters_of(folder) * once_rate / most


def parameters_of(folder):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{folder}/model"))
    return sum(one.numel() for one in model.parameters())


def peak_gib():
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if on_gpu() else None


class Batches(sides.Steps):
    """When each batch of stage 1 was done, and its tokens; waiting here would hold up the next."""

    def advance(self, done, *, tokens=0, padding=0):
        if tokens:
            self.ends.append((time.perf_counter(), tokens - padding))


def stage_one(folder, shape):
    """Makes the model, and scores its pairs and their mismatched ones into a cache.

    The rate counts each token once, from the end of the first batch, which compiles, to that of the
    last: without loading.
    """
    folder, batches = Path(folder), Batches()
    shutil.rmtree(folder, ignore_errors=True)  # what is scored already would not be timed
    made(folder, shape)
    began = time.perf_counter()
    small = {} if on_gpu() else {"scoring.tokens_per_batch": 1024}
    tally = sides.score(folder, folder / "cache", small, progress=batches)[0].counts
    seconds = batches.ends[-1][0] - batches.ends[0][0]
    rate = sum(tokens for _, tokens in batches.ends[1:]) / seconds
    whole = (tally.tokens - tally.padding) / tally.seconds
    return {
        "rate": rate,
        "rate_with_loading": whole,
        "mfu": mfu(folder, rate, 2),
        "mfu_with_loading": mfu(folder, whole, 2),
        "peak_gib": peak_gib(),
        "first": batches.ends[0][0] - began,
    }


def settings_of(folder, method, sets, flags):
    return sides.training_settings(folder, f"{folder}/run", method, sets, flags)


def planned_gib(folder, method, sets, flags):
    """The peak that `align plan` expects on this device."""
    from align.pipeline.plan.run_plan import plan_run

    return plan_run(settings_of(folder, method, sets, flags)).own.estimate.peak / 2**30


def with_align(folder, method, sets, flags):
    """Trains with align as its command does, from start to the written model."""
    steps = sides.Steps()
    sides.train_with_align(Path(folder), method, steps, sets, **flags)
    return speed(folder, steps, flags) | {"planned_gib": planned_gib(folder, method, sets, flags)}


def with_trl(folder, method, settings, lora):
    """Trains with TRL; `cudnn` among its settings is whether cuDNN's attention may be used."""
    import torch

    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed")
    steps, more = sides.Steps(), {}
    settings = {"bf16": on_gpu(), "use_cpu": not on_gpu()} | settings
    torch.backends.cuda.enable_cudnn_sdp(settings.pop("cudnn", True))
    if lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    dtype = {"dtype": torch.bfloat16}
    sides.train_with_trl(Path(folder), method, steps, settings, model=dtype, **more)
    return speed(folder, steps, {"lora.enabled": lora})


def speed(folder, steps, flags):
    counted, unique = sides.tokens_of(Path(folder))
    ends = [end for end, _ in steps.ends]
    seconds = statistics.median(later - earlier for earlier, later in pairwise(ends))
    share = 1 / len(ends) / seconds  # of all tokens, in a second
    operations = 4 if flags.get("lora.enabled") else 6
    return {
        "rate": counted * share,
        "mfu": mfu(folder, unique * share, operations),
        "peak_gib": peak_gib(),
        "first": ends[0] - steps.began,
    }


def sweep(folder, method):
    """Trains at four learning rates from one cache."""
    sides.as_a_command()
    from align.cli import app

    began, folder = time.perf_counter(), Path(folder)
    words = ["--method", method, "--cache", folder / "cache", "--lr", LEARNING_RATES]
    words += ["--output", folder / "sweep", "--set", f"train.batch_size={sides.PAIRS_PER_STEP}"]
    words += ["--set", "tracking.mlflow=false"]
    app(["sweep", *map(str, words)], standalone_mode=False)
    return {"whole": time.perf_counter() - began, "peak_gib": peak_gib()}


class Unsaved:
    """Records of a run that writes nothing: no model and no checkpoint."""

    def __init__(self, steps):
        self.steps = steps

    def stepped(self, position, metrics, line):
        self.steps.advance()

    def ran_out(self, step, tokens):
        sys.exit(f"memory ran out in step {step}; {tokens} tokens per batch would be next")

    def not_applied(self, step, row_ids):
        sys.exit(f"step {step} has NaN or infinity")

    def save(self, position):
        pass

    evaluated = log_margins = save


def learned_unsaved(folder, method, records, sets, flags):
    """Runs the loop of `align train` without a run folder; returns how the policy was run."""
    sides.as_a_command()
    from align.pipeline.train.load import identify
    from align.pipeline.train.setup import check
    from align.stages.engine.distributed import joined_world
    from support.training_world import session_of, through

    run = check(settings_of(folder, method, sets, flags))
    with joined_world() as world:
        identify(run, world)
        session = session_of(run, world)
        through(session, recorded=records)
    return {
        "recomputed": session.config.train.recomputes,
        "layout": session.policy.path.layout,
    }


def unsaved(folder, method, sets, flags, needs_gib=0, needs_host_gib=0):
    """Trains without saving: model, master weights and moments would take over 100 GB."""
    require_memory(needs_gib, needs_host_gib)
    steps = sides.Steps()
    policy = learned_unsaved(folder, method, Unsaved(steps), sets, flags)
    planned = {"planned_gib": planned_gib(folder, method, sets, flags)}
    return policy | speed(folder, steps, flags) | planned


def require_memory(gib, host_gib):
    import psutil
    import torch

    there = torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu() else math.inf
    if there < gib:
        sys.exit(f"needs a GPU of {gib} GiB")
    if psutil.virtual_memory().total / 2**30 < host_gib:
        sys.exit(f"needs {host_gib} GiB of the CPU's memory")


class Watched(Unsaved):
    """Profiles one step, and counts in the next where the host waits for the GPU."""

    def __init__(self):
        import torch

        from support.waits import Waits

        super().__init__(sides.Steps())
        kinds = torch.profiler.ProfilerActivity
        which = [kinds.CPU, *([kinds.CUDA] if on_gpu() else [])]
        self.profiler = torch.profiler.profile(activities=which)
        self.waits = Waits()

    def stepped(self, position, metrics, line):
        self.watch("default")
        super().stepped(position, metrics, line)
        if position.step == WARM:
            self.profiler.start()
        elif position.step == WARM + 1:
            self.profiler.stop()
            self.watch("warn")

    def watch(self, mode):
        """CUDA warns where the host waits for it, by a warning of Python's."""
        import torch

        if on_gpu():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: self.noted(str(message))
            torch.cuda.set_sync_debug_mode(mode)

    def noted(self, message):
        if "synchroniz" in message:
            self.waits.add("a synchronizing call")


def profile(folder, method, sets, flags):
    """One step by kind of kernel, and the waits of another."""
    watched = Watched()
    sets = [*sets, f"train.max_steps={LAST}"]
    policy = learned_unsaved(folder, method, watched, sets, flags)
    found = policy | by_kind(watched.profiler.events())
    shares = (
        f"{kind} {one['seconds'] / found['busy']:.0%}" for kind, one in found["kinds"].items()
    )
    found["shares"] = ", ".join(shares)
    waits = watched.waits.taken() if on_gpu() else sides.called(waits_pretended, folder)
    return found | {"waits": waits}


def by_kind(events):
    """Seconds of each kind of kernel, how many ran, and the longest by name.

    On a GPU a kernel's time counts, under the operations that launched it; on a CPU each
    operation's own time. Nothing counts twice.
    """
    seconds, counts, longest = Counter(), Counter(), Counter()
    for name, callers, micros in kernels_of(events):
        kind = kind_of(name, callers)
        seconds[kind] += micros / 1e6
        counts[kind] += 1
        longest[name[:80]] += micros / 1e6
    return {
        "busy": sum(seconds.values()),
        "kinds": {kind: {"seconds": seconds[kind], "kernels": counts[kind]} for kind in KINDS},
        "longest": dict(longest.most_common(12)),
    }


def kind_of(name, callers):
    if any(map(HEAD.search, callers)):
        return "head"
    if ATTENTION.search(name) or any(map(ATTENTION.search, callers)):
        return "attention"
    return "products" if PRODUCT.search(name) else "between"


def kernels_of(events):
    """The name of each kernel, the names of those that called it, and its microseconds."""
    on_host = [one for one in events if one.device_type.name == "CPU"]
    on_gpu = [one for one in events if one.device_type.name != "CPU"]
    if not on_gpu:
        for one in on_host:
            yield one.name, callers_of(one), one.self_cpu_time_total
        return
    # An operation lists its kernels by name and time; a kernel does not know its operation.
    launched = defaultdict(list)
    for one in on_host:
        for kernel in one.kernels:
            launched[kernel.name, kernel.duration].append(one)
    for one in on_gpu:
        if not one.is_user_annotation:
            micros = one.time_range.elapsed_us()
            known = launched[one.name, micros]
            yield one.name, callers_of(known.pop() if known else None), micros


def callers_of(event):
    """The names of an operation and of those that it is a part of."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def waits_pretended(folder):
    """The waits of a step on a device that is not there, which takes a process of its own."""
    from support import device_steps

    found = device_steps.compared(Path(folder) / "cache", "dpo", "flex", "lora")
    return found["waits"] if "error" not in found else sys.exit(found["error"])


KEPT = ("train.gradient_checkpointing=false", "train.tokens_per_batch=4096")
RECOMPUTED = ("train.gradient_checkpointing=true",)
IN_BFLOAT16 = ("train.deepspeed=zero2", "train.optimizer_dtype=bfloat16", "train.beta2=0.95")
OFFLOADED = ("train.deepspeed=zero2-offload",)
LORA = {"lora.enabled": True}
TRL_KEPT = {"gradient_checkpointing": False}
TRL_PRECOMPUTED = TRL_KEPT | {"precompute_ref_log_probs": True}
# cuDNN's attention plans each shape anew: a user who knows that switches it off.
TRL_TUNED = TRL_PRECOMPUTED | {"cudnn": False}
PARTS = {
    "large/stage1": (stage_one, "large"),
    "large/dpo/recomputed": (with_align, "dpo", RECOMPUTED, LORA),
    "large/dpo/kept": (with_align, "dpo", KEPT, LORA),
    "large/dpo/profile": (profile, "dpo", KEPT, LORA),
    "large/dpo/trl": (with_trl, "dpo", {}, True),
    "full/dpo/bfloat16": (unsaved, "dpo", (*RECOMPUTED, *IN_BFLOAT16), {}, 105),
    "full/dpo/offload": (unsaved, "dpo", (*RECOMPUTED, *OFFLOADED), {}, 30, 125),
    "small/stage1": (stage_one, "small"),
    "small/dpo/align": (with_align, "dpo", (), {}),
    "small/kto/align": (with_align, "kto", (), {}),
    "small/orpo/align": (with_align, "orpo", (), {}),
    "small/dpo/trl": (with_trl, "dpo", {}, False),
    "small/dpo/trl_kept": (with_trl, "dpo", TRL_KEPT, False),
    "small/dpo/trl_precomputed": (with_trl, "dpo", TRL_PRECOMPUTED, False),
    "small/dpo/trl_tuned": (with_trl, "dpo", TRL_TUNED, False),
    "small/kto/trl": (with_trl, "kto", {}, False),
    "small/orpo/trl": (with_trl, "orpo", {}, False),
    "small/dpo/sweep": (sweep, "dpo"),
}
TABLE = {  # a figure and its form by the head of its column
    "tokens/s": ("rate", "{:,.0f}"),
    "MFU": ("mfu", "{:.1f} %"),
    "peak": ("peak_gib", "{:.1f} GiB"),
    "planned": ("planned_gib", "{:.1f} GiB"),
    "first step": ("first", "{:.0f} s"),
    "whole": ("whole", "{:.0f} s"),
    "GPU time": ("shares", "{}"),
    "failed": ("failed", "{}"),
}

if __name__ == "__main__":
    main(sys.argv[1:])
