import dataclasses
import json
import random

import pytest

from align.schemas.errors import (
    AlignError,
    CorruptionError,
    FingerprintError,
    OlderFormatError,
    UsageError,
)
from align.schemas.json_codec import digest, to_json
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest, root_of, write_manifest
from support.made_caches import make_cache


def test_a_manifest_is_the_same_whenever_and_wherever_it_is_made(cache, tmp_path):
    make_cache(tmp_path / "again")
    assert cache.manifest.read_bytes() == (tmp_path / "again" / "manifest.json").read_bytes()
    manifest = load_manifest(cache)
    assert manifest.rows == sum(shard.rows for shard in manifest.shards) == 15
    assert manifest.quarantined == {"null": 1, "oom": 3}
    assert manifest.notes == {"repeats": 1, "swaps": 6}  # the plan's, and two of each shard
    plain = json.loads(cache.manifest.read_text())
    held = {name: plain[name] for name in plain if name not in ("root", *NOT_NAMED)}
    assert manifest.root == digest(held)


def leaves(value, path=()):
    """Every place in a JSON value, with what is there."""
    yield path, value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, (*path, key))


def altered(value):
    """Other values of the same type, and of others."""
    if isinstance(value, bool) or value is None:
        return [1]
    if isinstance(value, int):
        return [value + 1, -1, float(value), str(value)]
    if isinstance(value, float):
        return [value + 0.5, float("nan"), float("inf"), None]
    if isinstance(value, str):
        return [value + "0", "../" + value, ""]
    if isinstance(value, list):
        return [[*value, 7], value[:-1] if value else [[]], {}]
    return [{**value, "extra": 1}, {}, []]


def put(plain, path, value):
    if not path:
        return value
    at = copy = json.loads(json.dumps(plain))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


NOT_NAMED = ("align_version", "model", "adapter")  # who made it of what; not what it holds


def test_no_field_of_a_manifest_can_be_altered_unnoticed(cache):
    text = cache.manifest.read_text()
    plain = json.loads(text)
    cases = 0
    for path, value in leaves(plain):
        for other in altered(value):
            if path and path[-1] in NOT_NAMED and isinstance(other, str):
                continue
            cache.manifest.write_text(json.dumps(put(plain, path, other), sort_keys=True))
            require_refused(cache)
            cases += 1
    assert cases > 200
    cache.manifest.write_text(text)
    load_manifest(cache)


def require_refused(cache):
    with pytest.raises(AlignError) as error:
        load_manifest(cache)
    assert error.value.exit_code in (4, 5)


NAMES = (
    "../x",
    "/" + "etc/passwd",
    "part-00000001-0123456789abcdef.parquet\0",
    "part-00000001-0123456789abcdef.parquet\n",
    "part-00000001-0123456789ABCDEF.parquet",
    "part-0000000\u0661-0123456789abcdef.parquet",
    "part-00000001\u22150123456789abcdef.parquet",
    "quarantine/../part-00000001-0123456789abcdef.parquet",
    "part-00000001-0123456789abcdef.parquet.tmp",
    "part-00000009-0123456789abcdef.parquet",
    "part-00000001-0123456789abcdeg.parquet",
)


def test_a_manifest_that_fits_its_own_root_must_still_name_what_is_of_the_cache(cache):
    manifest = load_manifest(cache)
    first, second, third = manifest.shards
    for name in NAMES:
        _refused_with(cache, "shard 1 is misnamed", shards=(first, _as(name, second), third))
        entry = _as(name, manifest.quarantine[0])
        _refused_with(cache, "names the file", quarantine=(entry,))
    _refused_with(cache, "totals", rows=99)
    _refused_with(cache, "misnamed", shards=manifest.shards[::-1])
    _refused_with(cache, "misnamed", shards=(first, first, second))


def _as(name, entry):
    return dataclasses.replace(entry, file=name)


def _refused_with(cache, said, **fields):
    whole = cache.manifest.read_bytes()
    wrong = dataclasses.replace(load_manifest(cache), **fields)
    cache.manifest.unlink()
    write_manifest(cache, dataclasses.replace(wrong, root=root_of(wrong)))
    with pytest.raises(CorruptionError, match=said):
        load_manifest(cache)
    cache.manifest.write_bytes(whole)


def test_the_command_for_an_older_cache_names_what_was_set_and_nothing_else(cache):
    made = {
        "model.adapter": "none",  # the digest of one, where there is one
        "model.dtype": "bfloat16",
        "tokens.max_length": "512",
        "tokens.eos": "append",
        "cache.token_logps": "true",
        "cache.kl_pairs": "1",
        "scoring.tokens_per_batch": "16384",
        "numerics.torch": "2.4",
    }
    old = {"format_version": 1, "inputs": [{"name": "a b.jsonl"}], "model": "m", "adapter": ""}
    cache.manifest.write_text(json.dumps(old | {"fingerprint": made}))
    with pytest.raises(OlderFormatError) as error:
        load_manifest(cache)
    assert str(error.value).splitlines()[-1].strip() == (
        f"align precompute-ref 'a b.jsonl' --model m --output {cache.root}-v2 "
        "--set model.dtype=bfloat16 --set tokens.max_length=512 --set cache.token_logps=true"
    )
    assert error.value.exit_code == 4
    for lost in ({"inputs": [None, {}], "fingerprint": 3}, {"inputs": 7}, {}):
        cache.manifest.write_text(json.dumps({"format_version": 1} | lost))
        with pytest.raises(OlderFormatError, match="made by an older align"):
            load_manifest(cache)


def test_scribbles_and_flipped_bits_are_refused_without_a_traceback(cache, tmp_path):
    with pytest.raises(UsageError, match="not a finished cache"):
        load_manifest(CacheFolder(tmp_path))
    text, draw = cache.manifest.read_bytes(), random.Random(0)
    for case in (b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", text + b" ", text[:-1]):
        cache.manifest.write_bytes(case)
        with pytest.raises(CorruptionError):
            load_manifest(cache)
    plain = json.loads(text)
    cache.manifest.write_text(to_json(plain | {"format_version": 99, "new_field": 1}))
    with pytest.raises(FingerprintError, match="Install a newer align"):
        load_manifest(cache)
    kept = [to_json({name: plain[name]})[1:-2].encode() for name in NOT_NAMED]
    for _ in range(400):
        damaged = bytearray(text)
        damaged[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        cache.manifest.write_bytes(damaged)
        if all(field in damaged for field in kept):
            require_refused(cache)
