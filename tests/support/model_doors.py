"""Model folders read as the two stages read them, each in a process with a clock and a limit."""

import contextlib
import gc
import json
import math
import os
import re
import resource
import select
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from align.schemas.config import ModelOptions
from align.schemas.data_options import TokenOptions
from align.schemas.errors import AlignError
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.data import tokenizer
from align.stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from align.stages.demo.tiny_tokenizer import make_tokenizer
from align.stages.model.generate import own_stops
from align.stages.model.loading import folder_check, load, model_folder
from align.stages.model.loading.folder_check import require_adapter
from align.stages.model.loading.model_folder import ModelFiles, model_identity
from align.stages.model.policy import load_policy
from align.stages.model.reference import HfReference
from support.families import saved_adapter, tiny_model

VOCABULARY = 1024
TEXTS = (
    "Which is the better answer, and why?",
    "Zwölf Boxkämpfer <|im_end|> jagen\n",
    "aaaaaaaa b",
)
CPU_SECONDS, WALL_SECONDS = 10, 60
MEMORY = 1 << 30  # above what the process has before
ROOM = 3 << 30  # of addresses: beyond it an allocation fails
GOOD = ("same", "other", "refused")  # how the reading of a folder may end
NAMES_FILE = re.compile(r"[\w-]+\.(json|safetensors|model|txt|jinja)\b")
FAMILIES = {
    "llama": ("llama", {}),
    "sharded": ("llama", {}),
    "adapted": ("llama", {}),
    "mixture": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "windows": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}


def make_bases(root):
    """Undamaged folders by name, made with a tokenizer and what goes with generation."""
    bases = {}
    for name, (kind, settings) in FAMILIES.items():
        folder = root / name
        make_tokenizer(folder)
        model = tiny_model(kind, settings | {"vocab_size": VOCABULARY, "initializer_range": 0.1})
        how = {"max_shard_size": "60KB"} if name == "sharded" else {}
        model.save_pretrained(folder, **how)
        if name == "adapted":
            saved_adapter(folder / "adapter", folder)
        bases[name] = folder
    return bases


def read(folder, *, trains=False):
    """Log-probs of a few rows of a model folder, by the doors that the commands go through."""
    adapter = folder / "adapter"
    options = ModelOptions(path=str(folder), adapter=str(adapter) if adapter.exists() else "")
    loaded = load_tokenizer(options.path, TokenOptions())
    tokenizer_fingerprint(loaded)
    rows = [loaded.backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    loaded.continuation(rows[0][-3:])
    own_stops(options)
    trees = [Tree(np.array(ids[:3], np.int32), (np.array(ids[3:], np.int32),)) for ids in rows]
    if trains:
        if options.adapter:
            require_adapter(options.adapter)
        files = ModelFiles.of(options)
        model_identity(options)
        policy = load_policy(options, TrainOptions(dtype="float32"), LoraOptions())
        files.require_unchanged()
        with torch.no_grad():
            return policy(trees)[0].flatten().tolist()
    reference = HfReference(options)
    reference.hidden_size()
    reference.identity()
    reference.context()
    return reference.open().score(trees).tolist()


# Checks that may be left out, to see what they are for.
CHECKS = {
    "sizes": ("require_declared_sizes", [load, tokenizer, folder_check]),
    "parameters": ("require_stored_parameters", [load]),
    "experts": ("require_enough_experts", [load]),
    "gaps": ("_require_gapless", [model_folder]),
    "plain files": ("require_plain_files", [folder_check]),
}


@contextlib.contextmanager
def without_check(name):
    """Folders are read without one of the checks inside."""
    check, modules = CHECKS[name]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, check, return_value=None))
        yield


@dataclass(frozen=True)
class Outcome:
    """How the reading of a folder ended."""

    kind: str  # same, other, refused; or traceback, abort, hang, memory, not finite, no file named
    said: str
    seconds: float  # of the processor
    megabytes: int  # above what the process had before


class Reader:
    """Reads folders in children of this process, which has read the undamaged ones before."""

    def __init__(self, bases):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(1)
        self._bases = bases
        self._whole = {}
        self._numbers_of("llama", trains=False)  # imports what the children would
        gc.collect()
        gc.freeze()

    def _numbers_of(self, base, *, trains):
        if (base, trains) not in self._whole:
            self._whole[base, trains] = read(self._bases[base], trains=trains)
        return self._whole[base, trains]

    def outcome(self, base, folder, *, trains=False, is_meant=False, seconds=CPU_SECONDS):
        """How the reading of a damaged copy of a base ends."""
        whole = self._numbers_of(base, trains=trains)
        into, out = os.pipe()
        child = os.fork()
        if not child:
            os.close(into)
            _child(out, whole, folder, trains=trains, seconds=seconds)
        os.close(out)
        with os.fdopen(into, "rb") as stream:
            answer = _until_closed(stream, WALL_SECONDS)
        if answer is None:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        spent = used.ru_utime + used.ru_stime
        if not answer:
            is_late = answer is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in LATE)
            said = f"still reading after {spent:.0f} s" if is_late else f"wait status {status}"
            return Outcome("hang" if is_late else "abort", said, spent, 0)
        told = json.loads(answer)
        return Outcome(_judged(told, is_meant=is_meant), told["said"], spent, told["megabytes"])


LATE = (signal.SIGXCPU, signal.SIGKILL)


def _until_closed(stream, seconds):
    """What is written into a pipe until it is closed; None if that takes longer."""
    parts, end = [], time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([stream], [], [], left)[0]:
            break
        if not (part := os.read(stream.fileno(), 1 << 16)):
            return b"".join(parts)
        parts.append(part)
    return None


def _judged(told, *, is_meant):
    kind = told["kind"]
    if told["megabytes"] << 20 > MEMORY:
        return "memory"
    if kind == "refused" and not NAMES_FILE.search(told["said"]):
        return "no file named"
    return "wrong in silence" if kind == "other" and not is_meant else kind


def _child(out, whole, folder, *, trains, seconds):
    """Reads the folder and writes how that ended into a pipe."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    used = _kilobytes("VmSize") << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    spent = math.ceil(sum(os.times()[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the highest use begins anew
    before = _kilobytes("VmRSS")
    try:
        kind, said = _compared(read(folder, trains=trains), whole), ""
    except AlignError as error:
        kind, said = "refused", f"{type(error).__name__}: {error}"
    except BaseException as error:  # also the panics of Rust
        kind = "traceback"
        where = traceback.extract_tb(error.__traceback__)
        own = [
            f"{Path(one.filename).name}:{one.lineno}" for one in where if "align" in one.filename
        ]
        said = f"{type(error).__name__}: {str(error)[:300]} at {' '.join(own[-3:])}"
    megabytes = max(0, _kilobytes("VmHWM") - before) >> 10
    told = {"kind": kind, "said": said[:2000], "megabytes": megabytes}
    os.write(out, json.dumps(told).encode())
    os._exit(0)


def _compared(found, whole):
    if not all(map(math.isfinite, found)):
        return "not finite"
    return "same" if len(found) == len(whole) and np.allclose(found, whole, atol=1e-4) else "other"


def _kilobytes(name):
    line = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(line[1])
