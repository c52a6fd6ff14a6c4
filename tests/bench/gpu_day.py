"""All that one GPU can say of align, in parts of under ten minutes: `make gpu-day`.

    python -P -m bench.gpu_day [--only NAME …] [--again NAME …] [--write]     (PYTHONPATH=tests)

A second call goes on where the first one ended: its time was over, or it was killed. What was
measured on the same card, with the same versions and the same code, is not measured again; what was
missed is tried again after all the rest. A name is that of a part or of a group of them (`small`,
`small/kto`). `--write` measures nothing: it puts the records into docs/gpus.json and, from there,
into the marked regions of docs/gpus.md, part by part. `--tiny` tries every part with a tiny model
on a CPU, and writes a page beside its records instead. `--scratch` keeps models and caches for the
next call.

The order is that of worth for a minute. First the training of eight billion weights, for which a
GPU is needed most, with what a change to it would move: compiled layers, kept activations, where
the time goes, and all weights. Then the small model, by each method, and the tests marked gpu: by
plan one call holds all of these but the tests of FlexAttention, green on a GPU before.
Last TRL beside the small model, and what is slow. What does not fit any more makes room for
shorter parts.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench import gpu_page
from bench.timed_parts import Call, Part, Records, is_named
from support.rooms import ROOMS

ROOT = Path(__file__).parents[2]
# The settings of each side: adapt them here.
KEPT = ("train.gradient_checkpointing=false", "train.tokens_per_batch=4096")
COMPILED = ("model.compile=true",)
# States as TRL has them, and about the memory that it takes.
SMALL = ("train.deepspeed=zero2", "train.optimizer_dtype=bfloat16", "train.memory=8g")
RECOMPUTED = ("train.gradient_checkpointing=true",)
LORA = {"lora.enabled": True}
IN_BFLOAT16 = ("train.deepspeed=zero2", "train.optimizer_dtype=bfloat16", "train.beta2=0.95")
OFFLOADED = ("train.deepspeed=zero2-offload",)
NOT_ON_CPU = {"train.deepspeed=zero2-offload", "train.deepspeed=zero2"}
NOT_ON_CPU |= {*COMPILED, *SMALL}  # slow to compile; 8 GB are no bound of a tiny model
NOT_ON_CPU |= {"train.optimizer_dtype=bfloat16", "train.beta2=0.95"}
TRL_KEPT = {"gradient_checkpointing": False}
# cuDNN's attention plans each shape anew: a user who knows that switches it off.
TRL_TUNED = TRL_KEPT | {"precompute_ref_log_probs": True, "cudnn": False}
SECONDS = 1500.0
VERSIONS = ("torch", "transformers", "deepspeed", "trl")


def align(model, name, expected, *sets, function="with_align", **flags):
    return model, name, expected, function, (name.split("/")[0], sets, flags)


def trl(model, name, expected, settings):
    return model, name, expected, "with_trl", (name.split("/")[0], settings, model == "large")


# Model, part, seconds on an H100, function of gpu.py, what it is given behind the folder.
MEASURED = (
    ("large", "stage1", 110, "stage_one", ()),
    align("large", "dpo/recomputed", 80, *RECOMPUTED, **LORA),
    align("large", "dpo/kept_compiled", 90, *KEPT, *COMPILED, **LORA),
    align("large", "dpo/kept", 75, *KEPT, **LORA),
    align("large", "dpo/profile", 70, *KEPT, function="profile", **LORA),
    ("full", "dpo/bfloat16", 90, "unsaved", ("dpo", (*RECOMPUTED, *IN_BFLOAT16), {}, 105)),
    ("small", "stage1", 45, "stage_one", ()),
    align("small", "dpo/align", 65),
    align("small", "kto/align", 65),
    align("small", "orpo/align", 65),
)
# Files of tests marked gpu, and how long they take; on one GPU those of several skip themselves.
TESTS = {
    "generate": ("stages/model/test_generate.py", 30),
    "waits": ("stages/model/test_reference.py", 30),
    "compiled": ("stages/model/test_compiled_layers.py", 200),
    "steps": ("test_gpu_memory.py", 300),
    "long_rows": ("pipeline/test_long_rows.py", 60),
    "routers": ("stages/model/test_router_watch.py", 60),
    "attention": ("stages/model/test_flex_attention.py", 200),
    "several": ("stages/train/test_invariance.py stages/engine/test_ranks.py", 200),
}
BESIDE = (
    trl("small", "dpo/trl_tuned", 70, TRL_TUNED),
    align("small", "dpo/asked", 75, *SMALL),
    trl("small", "kto/trl", 100, {}),
    trl("small", "orpo/trl", 80, {}),
    trl("small", "dpo/trl", 80, {}),
    align("large", "dpo/align", 80, **LORA),
    # Last: of a machine whose memory it fills, nothing else is lost.
    ("full", "dpo/offload", 240, "unsaved", ("dpo", (*RECOMPUTED, *OFFLOADED), {}, 30, 125)),
)
# Only where they are named: slower sides of TRL, and a sweep.
ON_DEMAND = (
    trl("large", "dpo/trl", 120, {}),
    trl("small", "dpo/trl_kept", 70, TRL_KEPT),
    trl("small", "dpo/trl_precomputed", 75, TRL_KEPT | {"precompute_ref_log_probs": True}),
    trl("small", "kto/trl_tuned", 90, TRL_TUNED),
    trl("small", "orpo/trl_kept", 75, TRL_KEPT),
    ("small", "dpo/sweep", 130, "sweep", ("dpo",)),
)
# The compiler of kernels leaves files of its helper processes open.
QUIET = ("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning")


def main():
    options = parsed()
    if options.write:
        found = gpu_page.records_in(options.records)
        gpu_page.write(ROOT / "docs", found, parts(), usual_parts())
        print(f"{len(found)} records of {options.records} went to docs/gpus.json and the page")
        return
    ends = time.monotonic() + options.seconds
    machine = machine_here(options.commit)
    if machine["device"] == "CPU" and not options.tiny:
        sys.exit("torch finds no GPU here that it can use; --tiny tries every part on a CPU.")
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))  # parts run elsewhere
    records = Records.under(options.records, machine)
    with tempfile.TemporaryDirectory() as folder:
        scratch = options.scratch or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        left = run(records, scratch.absolute(), ends, options)
    print(f"{len(left)} parts are left for another call; records are in {records.folder}")
    if options.tiny:
        found, every = records.all().values(), parts(is_tiny=True)
        gpu_page.preview(ROOT / "docs", records.folder, found, every, usual_parts())


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole call")
    parser.add_argument("--records", type=Path, default=ROOT / "bench-results/gpu-day")
    parser.add_argument("--scratch", type=Path, help="kept; else a folder that is removed")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def run(records, scratch, ends, options):
    """Runs what is asked for and not measured yet; returns what is left."""
    every = parts(is_tiny=options.tiny)
    usual = {part.name for part in usual_parts()}
    asked = (*options.only, *options.again)
    for word in asked:
        if not any(is_named(part.name, [word]) for part in every):
            sys.exit(f"no part is called {word}: {', '.join(part.name for part in every)}")
    wanted = [p for p in every if (is_named(p.name, asked) if asked else p.name in usual)]
    return Call(records, scratch, ends, tuple(options.again), tuple(every)).run(wanted)


def parts(*, is_tiny=False):
    """All parts in order of worth."""
    found = [measurement(*one, is_tiny) for one in MEASURED]
    for name, (files, expected) in TESTS.items():
        words = [*(f"tests/{file}" for file in files.split()), "-m", "gpu", *QUIET]
        words += ["--collect-only"] if is_tiny else []
        found.append(part_of(f"tests/{name}", expected, "tests", [words]))
    return found + [measurement(*one, is_tiny) for one in (*BESIDE, *ON_DEMAND)]


def usual_parts():
    """Those that run without being named."""
    named = {f"{model}/{name}" for model, name, *_ in ON_DEMAND}
    return [part for part in parts() if part.name not in named]


def measurement(model, name, expected, function, given, is_tiny):
    shape = "small" if model == "small" else "large"  # all weights of the large one are `full`
    if name == "stage1":
        words, last = [shape, "tiny" if is_tiny else shape], f"{shape}/cache/manifest.json"
        return part_of(f"{model}/{name}", expected, function, words, makes=last)
    if is_tiny:
        given = [on_cpu(one) for one in given]
    words = [shape, *given]
    return part_of(f"{model}/{name}", expected, function, words, needs=f"{shape}/stage1")


def on_cpu(given):
    """What a function is given, without what only a GPU can do or has."""
    if isinstance(given, tuple):
        return [one for one in given if one not in NOT_ON_CPU]
    if isinstance(given, dict):
        return {name: value for name, value in given.items() if name != "cudnn"}
    return 0 if isinstance(given, int) and not isinstance(given, bool) else given


def part_of(name, expected, function, given, **files):
    words = ("-P", "-m", "bench.gpu", function, json.dumps(given))
    return Part(name, words, expected, limit=min(590, 3 * expected), **files)


def device_here():
    code = "torch.cuda.is_available() and torch.cuda.get_device_name() or 'CPU'"
    return said_by(sys.executable, "-c", f"import torch; print({code})")


def machine_here(commit):
    """The device and its versions, and the digest of the code and of its tests."""
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    own = ("gpu.py", "gpu_profile.py", "sides.py")
    files = [*ROOT.glob("*.py"), *(ROOT / "tests/bench" / name for name in own)]
    files += [ROOT / "tests" / file for named, _ in TESTS.values() for file in named.split()]
    rooms = (*ROOMS, "tests/support")
    files += [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files)))
    known = commit or said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return {
        "device": device_here(),
        "versions": {name: version_of(name) for name in VERSIONS} | {"driver": driver},
        "source": digest.hexdigest()[:12],
        "commit": known,
    }


def said_by(*command):
    """The first line that a program says; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def version_of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
