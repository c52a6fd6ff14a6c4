"""Model folders that are damaged by chance, and what a reader may make of each."""

import json
import math
import os
import random
import shutil
from dataclasses import dataclass

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG, ADAPTER = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
# How often each is damaged, and the models that have it; "" is any.
KINDS = {
    CONFIG: (34, ""),
    WEIGHTS: (16, "whole"),
    "shard": (5, "sharded"),
    INDEX: (7, "sharded"),
    TOKENIZER: (20, ""),
    TOKENIZER_CONFIG: (6, ""),
    GENERATION: (3, ""),
    ADAPTER_CONFIG: (6, "adapted"),
    ADAPTER: (3, "adapted"),
}
WRONG = (
    *("x", "", "10", [], {}, [1], [None], {"a": 1}, None, True, False, -1, 0, 1, 0.5, -0.5, 1e-300),
    *(10**4, 10**6, 10**9, 10**18, 10**30, -(10**9), 1e308, math.nan, math.inf, -math.inf),
    *([10**9], ["x"], [[["x", "y"], 10**9]], "\ud800", "a" * 100_000),
)
# Settings that some architectures or files have.
ADDED = {
    CONFIG: (
        *("head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "text_config"),
        *("quantization_config", "layer_types", "attention_bias", "sliding_window", "dtype"),
        *("tie_word_embeddings", "architectures", "model_type", "pad_token_id", "auto_map"),
        *("num_hidden_layers", "n_layer", "max_position_embeddings", "partial_rotary_factor"),
        *(
            "is_encoder_decoder",
            "pruned_heads",
            "id2label",
            "num_labels",
            "tp_plan",
            "problem_type",
        ),
        *("attn_implementation", "_attn_implementation", "torch_dtype", "use_cache", "rope_theta"),
    ),
    TOKENIZER: ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"),
    TOKENIZER_CONFIG: (
        *("added_tokens_decoder", "bos_token", "eos_token", "pad_token", "tokenizer_class"),
        *("model_max_length", "extra_special_tokens", "additional_special_tokens", "auto_map"),
        *("add_bos_token", "chat_template", "fix_mistral_regex", "backend", "split_special_tokens"),
        *("clean_up_tokenization_spaces", "model_specific_special_tokens", "padding_side"),
    ),
    GENERATION: ("eos_token_id", "max_length", "temperature", "cache_implementation", "num_beams"),
    ADAPTER_CONFIG: (
        *("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "exclude_modules"),
        *("modules_to_save", "layers_to_transform", "layers_pattern", "target_parameters", "bias"),
        *("trainable_token_indices", "init_lora_weights", "peft_type", "task_type", "use_dora"),
        *("layer_replication", "auto_mapping", "loftq_config", "lora_bias", "ensure_weight_tying"),
    ),
}
DTYPES = ("F32", "BF16", "F16", "F64", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", "")


@dataclass(frozen=True)
class Damage:
    """What was done to a folder."""

    base: str
    file: str
    what: str
    # Whether the folder is one that somebody may have meant: other numbers are right then.
    is_meant: bool = False


def file_of(seed):
    """Which file of a folder is damaged."""
    return _drawn(seed)[1]


def _drawn(seed):
    draw = random.Random(f"model folder {seed}")
    return draw, *draw.choices([*KINDS], [often for often, _ in KINDS.values()])


def damage(bases, folder, seed):
    """Copies one of the folders `bases` and damages a file of it, as the seed says."""
    draw, kind = _drawn(seed)
    having = [name for name in sorted(bases) if _has(bases[name], kind)]
    base = draw.choice(having)
    shutil.copytree(bases[base], folder)
    name = draw.choice(sorted(p.name for p in folder.glob("model-*"))) if kind == "shard" else kind
    file = folder / name
    if draw.random() < 0.03:
        return Damage(base, kind, elsewhere(file, draw))
    change = _header if name.endswith(".safetensors") else _json
    what, is_meant = change(file, kind, draw)
    return Damage(base, kind, what, is_meant)


def _has(base, kind):
    return any(base.glob("model-*")) if kind == "shard" else (base / kind).exists()


def elsewhere(file, draw):
    """What may stand in the place of a file."""
    content = file.read_bytes()
    file.unlink()
    match draw.randrange(5):
        case 0:
            return "missing"
        case 1:
            file.mkdir()
            return "a folder"
        case 2:
            os.mkfifo(file)
            return "a pipe"
        case 3:
            file.symlink_to("nowhere")
            return "a link to nothing"
        case _:
            file.write_bytes(content[:0])
            return "empty"


def _json(file, kind, draw):
    content = file.read_bytes()
    before = json.loads(content)
    what, after = other_json(content, before, kind, draw)
    file.write_bytes(after)
    return what, _is_meant(before, after)


def other_json(content, before, kind, draw):
    """A description, and the bytes of a JSON file that was damaged."""
    way = draw.random()
    if way < 0.55:
        return _other_value(json.loads(content), kind, draw)
    if way < 0.7:
        name, value = draw.choice(ADDED.get(kind, ("metadata", "weight_map"))), draw.choice(WRONG)
        return f"{name} = {shown(value)}", encoded({**before, name: value})
    if way < 0.9:
        return other_bytes(content, draw)
    return draw.choice(
        [
            ("null", b"null"),
            ("[]", b"[]"),
            ("{}", b"{}"),
            ("a number", b"7"),
            ("a text", b'"x"'),
            ("lists 100,000 deep", b"[" * 100_000 + b"]" * 100_000),
            ("an object 100,000 deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
            ("twice", content + content),
            ("a key twice", content.rstrip()[:-1] + b"," + content.lstrip()[1:]),
            ("UTF-16", content.decode().encode("utf-16")),
            ("in a list", b"[" + content + b"]"),
        ]
    )


def encoded(value):
    """JSON as Python writes it; a lone half of a character may be in it."""
    return json.dumps(value, indent=1).encode()


def shown(value):
    """A value, cut short."""
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:50]}… ({len(text)})"


def _other_value(tree, kind, draw):
    """The JSON with one value, at any depth, that is another, missing or there twice."""
    parent, key, path = tree, None, ""
    while True:
        keys = [*parent] if isinstance(parent, dict) else [*range(len(parent))]
        if not keys:
            break
        key = draw.choice(keys)
        path += f".{key}" if isinstance(parent, dict) else f"[{key}]"
        below = parent[key]
        if not isinstance(below, dict | list) or not below or draw.random() < 0.2:
            break
        parent = below
    if key is None or not keys:
        return "as it was", encoded(tree)
    way = draw.random()
    if way < 0.2:
        del parent[key]
        return f"{path} missing", encoded(tree)
    value = parent[key]
    near = [value * 2, value + 1, value // 2, -value] if type(value) is int else []
    near += [value * 1e6, -value] if type(value) is float else []
    near += [value[1:], value + "x", value.upper()] if isinstance(value, str) else []
    near += [value * 2, value[1:], value[::-1]] if isinstance(value, list) else []
    parent[key] = draw.choice(near if near and draw.random() < 0.25 else WRONG)
    return f"{path} = {shown(parent[key])}", encoded(tree)


def other_bytes(content, draw):
    """A description, and bytes of which some are other ones or missing."""
    data, at = bytearray(content), draw.randrange(len(content))
    size = draw.choice((1, 4, 64))
    match draw.randrange(6):
        case 0 | 1 | 2:
            data[at] ^= 1 << draw.randrange(8)
            what = f"a bit of byte {at} flipped"
        case 3:
            del data[at:]
            what = f"cut off at {at}"
        case 4:
            del data[at : at + size]
            what = f"{size} bytes at {at} missing"
        case _:
            data[at : at + size] = draw.randbytes(size)
            what = f"{size} bytes at {at} replaced"
    return what, bytes(data)


def _header(file, kind, draw):
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + size], content[8 + size :]
    way, is_meant = draw.random(), False
    if way < 0.25:
        what, after = other_bytes(header, draw)
        is_meant = _is_meant(json.loads(header), after)
    elif way < 0.75:
        what, after = _other_entry(json.loads(header), draw)
        is_meant = _is_meant(json.loads(header), after)
    elif way < 0.9:
        what, after = other_json(header, json.loads(header), kind, draw)
        is_meant = _is_meant(json.loads(header), after)
    elif way < 0.95:
        cut = draw.randrange(len(content))
        file.write_bytes(content[:cut])
        return f"cut off at {cut}", False
    else:
        wrong = draw.choice([0, 1, 7, size - 1, size + 1, size * 2, 2**32, 2**63, 2**64 - 1])
        file.write_bytes(wrong.to_bytes(8, "little") + header + body)
        return f"length {wrong}", False
    if draw.random() < 0.5:  # as a writer pads it; elsewhere only the length is another
        after += b" " * (-len(after) % 8)
    file.write_bytes(len(after).to_bytes(8, "little") + after + body)
    return what, is_meant


def _other_entry(header, draw):
    """A header in which the entry of one tensor says something else."""
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.choice(names), draw.choice(names)
    entry = header[name]
    way = draw.randrange(12)
    if way < 3:
        field = draw.choice(["dtype", "shape", "data_offsets"])
        del entry[field]
        what = f"without {field}"
    elif way < 5:
        entry["dtype"] = draw.choice(DTYPES)
        what = f"dtype {entry['dtype']}"
    elif way == 5:
        field = draw.choice(["dtype", "shape", "data_offsets"])
        entry[field] = draw.choice(WRONG)
        what = f"{field} {shown(entry[field])}"
    elif way == 6:
        at, field = draw.randrange(2), draw.choice(["shape", "data_offsets"])
        at = at % max(1, len(entry[field]))
        entry[field][at] = draw.choice(WRONG)
        what = f"{field}[{at}] {shown(entry[field][at])}"
    elif way == 7:
        entry["shape"] = entry["shape"][::-1]
        what = "shape turned round"
    elif way == 8:
        move = draw.choice([1, 4, 64, -4, 10**9])
        entry["data_offsets"] = [entry["data_offsets"][0] + move, entry["data_offsets"][1] + move]
        what = f"moved by {move}"
    elif way == 9:
        entry["data_offsets"] = header[other]["data_offsets"]
        what = f"over {other}"
    elif way == 10:
        header[draw.choice([name + "x", "", "a" * 100_000, "\ud800", other])] = header.pop(name)
        what = "renamed"
    else:
        del header[name]
        what = "missing"
    return f"{name}: {what}", encoded(header)


def _is_meant(before, after):
    """Whether a JSON text differs from the value `before` by values of the same kind alone."""
    try:
        now = json.loads(after)
    except (ValueError, RecursionError):
        return False
    return _alike(before, now)


# Texts that a tokenizer may have or not.
AFFIXES = ("end_of_word_suffix", "continuing_subword_prefix")


def _alike(before, now):
    if isinstance(before, dict) and isinstance(now, dict):
        # A name that is missing or unknown is a folder that somebody may have meant.
        both = before.keys() & now.keys()
        with_texts = {name: now[name] for name in both if name in AFFIXES}
        return all(isinstance(one, str | None) for one in with_texts.values()) and all(
            _alike(before[name], now[name]) for name in both - with_texts.keys()
        )
    if isinstance(before, list) and isinstance(now, list):
        kinds = [_kind(one) for one in before]
        return all(_kind(one) in kinds for one in now) if before else True
    if before is None or now is None:
        return not isinstance(now, str) and _is_finite(now)
    return _kind(before) == _kind(now) and _is_finite(now)


def _kind(value):
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if is_number else type(value)


def _is_finite(value):
    return not isinstance(value, float) or math.isfinite(value)
