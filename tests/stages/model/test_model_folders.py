"""Model folders that strangers wrote: each is read, or refused by one message, in bounds."""

import json
import os
import shutil
from functools import partial

import pytest
import torch

from align.schemas.errors import MemoryLimitError
from align.stages.model.loading.library_errors import refused_as
from support.damaged_models import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
)
from support.model_doors import GOOD, Reader, make_bases, without_check

LARGE = 70 << 20  # bytes


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def reader(bases):
    return Reader(bases)


INFINITE = float("inf")


def with_setting(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def with_part(file, part, **settings):
    content = json.loads(file.read_text())
    content[part] |= settings
    file.write_text(json.dumps(content))


def with_bytes(file, content):
    file.write_bytes(content)


def with_header(file, header):
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


def with_entry(file, **fields):
    """Fields of the first tensor's entry; those that are ... are taken out."""
    content = file.read_bytes()
    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    name = next(name for name in entries if name != "__metadata__")
    changed = {**entries[name], **fields}
    entries[name] = {field: value for field, value in changed.items() if value is not ...}
    with_header(file, json.dumps(entries).encode())


def as_pipe(file):
    file.unlink()
    os.mkfifo(file)


def sizes(*settings, of=CONFIG, base="llama"):
    return [(base, of, partial(with_setting, **dict([one])), one[0]) for one in settings]


# The folder, the file, what is done to it, and what the message has to name.
CASES = [
    *sizes(
        ("hidden_size", "x"),
        ("hidden_size", None),
        ("hidden_size", [64]),
        ("hidden_size", 10**9),
        ("head_dim", 10**9),
        ("head_dim", 0),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 0),
        ("vocab_size", 10**30),
        ("max_position_embeddings", "x"),
        ("rms_norm_eps", -1),
        *(("attention_dropout", wrong) for wrong in (INFINITE, None, 2)),
        ("final_logit_softcapping", 1e-300),
        ("query_pre_attn_scalar", -256),
        *(("num_labels", wrong) for wrong in (20_000, 10**18)),
    ),
    *sizes(("n_positions", 10**6), ("n_layer", 10**9), base="gpt2"),
    *sizes(("num_experts", 10**9), base="mixture"),
    ("llama", CONFIG, partial(with_bytes, content=b" " * LARGE + b"{}"), "bytes"),
    ("llama", "chat_template.jinja", partial(with_bytes, content=b" " * (LARGE + 1)), "bytes"),
    ("llama", CONFIG, as_pipe, "not a plain file"),
    *[
        ("llama", WEIGHTS, partial(with_header, header=header), "not a safetensors file")
        for header in (b"[]", b"null", b"{}", b'{"a":1}')
    ],
    *[
        ("llama", WEIGHTS, partial(with_entry, **{field: value}), field)
        for field, value in (
            ("dtype", ...),
            ("dtype", 7),
            ("dtype", "\ud800"),
            ("data_offsets", ...),
            ("data_offsets", [0, "x"]),
            ("data_offsets", [4, 0]),
            ("data_offsets", [10**9, 10**9 + 4]),
            ("shape", "x"),
            ("shape", [10**30, 0]),
            ("shape", [-1]),
        )
    ],
    ("sharded", INDEX, partial(with_bytes, content=b"[]"), "JSON object"),
    # A text that Rust cuts behind its end, whose panic is no exception.
    (
        *("mixture", TOKENIZER),
        *(partial(with_part, part="model", continuing_subword_prefix="a" * 10**5), "tokenizer"),
    ),
    ("llama", TOKENIZER_CONFIG, partial(with_setting, model_max_length=[]), "'list'"),
    ("llama", GENERATION, partial(with_bytes, content=b"null"), "JSON object"),
    *sizes(("eos_token_id", "x"), of=GENERATION),
    *sizes(("r", 10**9), ("r", "x"), ("use_rslora", 1), of=ADAPTER_CONFIG, base="adapted"),
    *sizes(("lora_alpha", True), ("lora_alpha", -INFINITE), of=ADAPTER_CONFIG, base="adapted"),
    *sizes(("alora_invocation_tokens", [5]), of=ADAPTER_CONFIG, base="adapted"),
    *sizes(("alpha_pattern", {"q_proj": True}), of=ADAPTER_CONFIG, base="adapted"),
    ("adapted", ADAPTER_CONFIG, partial(with_setting, target_modules=7), "target_modules"),
    ("adapted", ADAPTER_CONFIG, as_pipe, "not a plain file"),
    ("adapted", ADAPTER, partial(with_header, header=b"[]"), "not a safetensors file"),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_damaged_file_is_refused_by_its_name_and_field(bases, reader, tmp_path, number):
    base, name, change, field = CASES[number]
    folder = shutil.copytree(bases[base], tmp_path / "model")
    change(folder / name)
    outcome = reader.outcome(base, folder, trains=bool(number % 2))
    assert outcome.kind == "refused", outcome
    assert name.rpartition("/")[2] in outcome.said
    assert field in outcome.said


def test_a_reader_without_a_check_is_found_out(bases, reader, tmp_path):
    folder = shutil.copytree(bases["llama"], tmp_path / "model")
    with_setting(folder / CONFIG, num_hidden_layers=10**9)
    assert reader.outcome("llama", folder).kind == "refused"
    with without_check("sizes"):
        assert reader.outcome("llama", folder, seconds=1).kind not in GOOD


def test_a_folder_that_is_whole_is_read(bases, reader):
    for base, folder in bases.items():
        assert reader.outcome(base, folder).kind == "same"


def test_memory_that_runs_out_is_no_fault_of_the_folder():
    with (
        pytest.raises(MemoryLimitError, match=r"config\.json cannot be loaded \(memory ran out"),
        refused_as("config.json cannot be loaded", "Copy the file again."),
    ):
        torch.empty(1 << 55)
