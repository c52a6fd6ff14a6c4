"""Folders of training runs that are damaged by chance, as they are or signed anew."""

import hashlib
import io
import json
import os
import pickle
import zipfile
from dataclasses import dataclass

import torch
from campaigns.damaged_caches import in_its_place, is_object, signed_record
from campaigns.hostile_settings import value

from align.stages.storage.disk.fs import sha256_of
from support.damaged_models import elsewhere, other_bytes, other_json

RECORD = "align_checkpoint.json"
JOURNAL, SETTINGS = "metrics.jsonl", "config.yaml"
LARGE = 1536 << 20  # more than a reader may take
LOST = ("missing", "a link to nothing")


@dataclass(frozen=True)
class Damage:
    """What was done to a folder."""

    what: str
    files: tuple  # names, of which a message has to have one
    is_signed: bool = False  # its digests were made to fit
    is_lost: bool = False  # a file is not there: what it said is missing
    is_impossible: bool = False  # no run has such a file


def damage(run, draw, *, is_continued):
    """Damages a file of a run, or several; states only where training continues from them."""
    way = draw.random()
    if way < (0.25 if is_continued else 0.5):
        return _one(run, draw)
    if way < 0.32 and is_continued:
        return _both(run, draw)
    if way < 0.4 and is_continued:
        return _swapped(run, draw)
    return _signed_state(run, draw) if way > 0.65 and is_continued else _signed(run, draw)


def _files(run):
    return sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())


def _drawn(run, draw):
    """A file, from each part of the folder as often."""
    files = _files(run)
    parts = sorted({path.relative_to(run).parts[0] for path in files})
    part = draw.choice([*parts, *(one for one in parts if one in ("checkpoints", "_align"))])
    return draw.choice([path for path in files if path.relative_to(run).parts[0] == part])


def _names(run, *files):
    """The names by which a message may call a file, the folders that it is in, or its run."""
    found = {file.name for file in files} | {"This run was begun", "The run was begun"}
    for file in files:
        found |= {str(parent) for parent in file.parents if parent.is_relative_to(run)}
    return tuple(sorted(found - {str(run)} | {f"{run} ", f"{run}:"}))


def _one(run, draw):
    file = _drawn(run, draw)
    names, way = _names(run, file), draw.random()
    if way < 0.3:
        what = in_its_place(file, run, draw)
        return Damage(f"{file.name}: {what}", names, is_lost=what in LOST)
    if way < 0.4:
        what = elsewhere(file, draw)
        return Damage(f"{file.name}: {what}", names, is_lost=what in LOST)
    if way < 0.5:
        os.truncate(file, file.stat().st_size + LARGE)
        return Damage(f"{file.name}: 1.5 GiB of zeros behind it", names)
    return Damage(f"{file.name}: {_other_content(file, draw)}", names)


def _other_content(file, draw):
    content = file.read_bytes()
    if file.suffix == ".json" and is_object(content) and draw.random() < 0.6:
        what, content = other_json(content, json.loads(content), "", draw)
    else:
        what, content = other_bytes(content, draw) if content else ("a byte", b"\0")
    file.write_bytes(content)
    return what


def _steps(run):
    return sorted((run / "checkpoints").glob("step-*"))


def _both(run, draw):
    """Damages both checkpoints: a run then begins anew, or says what is wrong."""
    files, said = [], []
    for step in _steps(run):
        file = draw.choice(_files(step))
        files.append(file)
        change = elsewhere if draw.random() < 0.4 else _other_content
        said.append(f"{step.name}/{file.name}: {change(file, draw)}")
    return Damage("; ".join(said), _names(run, *files))


def _swapped(run, draw):
    one, other = _steps(run)
    if draw.random() < 0.5:
        name = draw.choice([RECORD, *(f"state/{path.name}" for path in _files(one / "state"))])
        one, other = one / name, other / name
    elif draw.random() < 0.5:
        one, other = _drawn(run, draw), _drawn(run, draw)
        if one == other:
            return Damage("nothing", ())
    between = run.parent / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)
    return Damage(f"{one.name} and {other.name} swapped", _names(run, one, other))


def _signed(run, draw):
    """Writes other records, lines or settings, whose digests are right."""
    records = [step / RECORD for step in _steps(run)]
    kept = [
        path for path in sorted((run / "_align").glob("*.json")) if is_object(path.read_bytes())
    ]
    tables = sorted((run / "evaluations").glob("*.csv"))
    file = draw.choice(
        [
            *records,
            *records,
            *kept,
            run / JOURNAL,
            run / JOURNAL,
            run / SETTINGS,
            draw.choice(tables),
        ]
    )
    content = file.read_bytes()
    before = run.joinpath(JOURNAL).read_bytes()
    if file.suffix == ".json":
        plain = json.loads(content)
        del plain["digest"]
        what, content = other_json(json.dumps(plain).encode(), plain, "", draw)
        file.write_bytes(signed_record(content))
    elif file.name == JOURNAL:
        what = _other_line(file, draw)
    elif file.name == SETTINGS:
        what = _other_setting(file, draw)
    else:
        what = _other_cell(file, draw)
    if file.suffix != ".json":
        _sign(run, before)
    return Damage(f"{file.name}, signed: {what}", _names(run, file), is_signed=True)


def _other_line(file, draw):
    lines = file.read_bytes().splitlines(keepends=True)
    at = draw.randrange(len(lines))
    what, content = other_json(lines[at], json.loads(lines[at]), "", draw)
    lines[at] = content.replace(b"\n", b" ") + b"\n"
    file.write_bytes(b"".join(lines))
    return f"line {at}: {what}"


def _other_setting(file, draw):
    lines = file.read_text().splitlines()
    at = draw.choice([at for at, line in enumerate(lines) if line.startswith("  ")])
    name = lines[at].partition(":")[0]
    lines[at] = f"{name}: {value(draw, _Anything)}"
    text = "\n".join([*lines, ""])
    file.write_bytes(text.encode("utf-8", "replace"))
    return lines[at][:80]


class _Anything:
    kind = str


def _other_cell(file, draw):
    lines = file.read_text().splitlines()
    at = draw.randrange(len(lines))
    cells = lines[at].split(",")
    place = draw.randrange(len(cells))
    cells[place] = draw.choice(
        ["", "nan", "inf", "1e999", "9" * 400, "x", '"', "-1", "\0", "é" * 99]
    )
    lines[at] = ",".join(cells)
    file.write_text("\n".join([*lines, ""]))
    return f"line {at}: {lines[at][:60]!r}"


def _sign(run, journal=None):
    """Writes the digests of all files as they are now."""
    if journal is None:
        journal = (run / JOURNAL).read_bytes()
    for step in _steps(run):
        plain = json.loads((step / RECORD).read_bytes())
        for file in plain["files"]:
            _describe(step / file["path"], file)
        known = plain["position"]["journal"]
        lines = (run / JOURNAL).read_bytes().splitlines(keepends=True)
        begin = b"".join(lines[: journal[: known["bytes"]].count(b"\n")])
        known |= {"bytes": len(begin), "sha256": _digest(begin)}
        (step / RECORD).write_bytes(signed_record(json.dumps(plain).encode()))
    ending = run / "_align" / "ending.json"
    plain = json.loads(ending.read_bytes())
    for file in plain["files"]:
        _describe(run / file["path"], file)
    ending.write_bytes(signed_record(json.dumps(plain).encode()))


def _describe(path, entry):
    entry |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


class Hostile:
    """Runs a program when it is unpickled."""

    def __reduce__(self):
        return os.system, ("true",)


def _signed_state(run, draw):
    """Writes another state into one checkpoint or both."""
    steps = draw.choice([_steps(run), _steps(run), *([one] for one in _steps(run))])
    files = [draw.choice(sorted((step / "state").iterdir())) for step in steps]
    seed, said = draw.random(), []
    for file in files:
        what, is_impossible = _other_state(file, type(draw)(seed))
        said.append(f"{file.parent.parent.name}/{file.name}: {what}")
    _sign(run)
    names = (*_names(run, *files), *(step.name for step in steps))
    newest = steps[-1] == _steps(run)[-1]
    return Damage(
        f"signed: {'; '.join(said)}", names, is_signed=True, is_impossible=is_impossible and newest
    )


def _other_state(file, draw):
    """A description, and whether no engine has such a state."""
    way, content = draw.random(), torch.load(file, weights_only=False)
    if way < 0.12:
        hidden = draw.choice([Hostile(), {**content, "extra": Hostile()}])
        if draw.random() < 0.3:
            file.write_bytes(pickle.dumps(hidden))
        else:
            torch.save(hidden, file)
        return "a pickle with code", True
    if way < 0.2:
        what, damaged = other_bytes(file.read_bytes(), draw)
        file.write_bytes(damaged)
        return what, False
    if way < 0.25:
        _pack(file, swells=draw.random() < 0.3)
        return "packed", False
    what, is_impossible = _other_leaf(content, draw)
    torch.save(content, file)
    return what, is_impossible


def _pack(file, *, swells):
    """Deflates what is in a file, its first tensor as one that swells."""
    source, sink = zipfile.ZipFile(io.BytesIO(file.read_bytes())), io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name in source.namelist():
            with packed.open(name, "w") as member:
                member.write(source.read(name))
                if swells and name.endswith("data/0"):
                    for _ in range(LARGE >> 20):
                        member.write(bytes(1 << 20))
    file.write_bytes(sink.getvalue())


WRONG = (
    None,
    True,
    -1,
    0,
    7,
    10**9,
    2**70,
    0.5,
    float("nan"),
    "",
    "x" * 9000,
    [],
    {},
    [None],
    b"x",
)


def _leaves(tree, path=""):
    """Every place in nested dicts and lists: what it is in, its key, and how it is called."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, below in list(pairs):
        name = f"{path}[{key!r}]"
        if isinstance(tree, dict | list):
            yield tree, key, name
        if isinstance(below, dict | list | tuple):
            yield from _leaves(below, name)


def _other_leaf(content, draw):
    leaves = list(_leaves(content))
    tensors = [leaf for leaf in leaves if isinstance(leaf[0][leaf[1]], torch.Tensor)]
    if draw.random() < 0.6 and tensors:
        parent, key, name = draw.choice(tensors)
        what, is_impossible = _other_tensor(parent, key, draw)
        return f"{name[-60:]} {what}", is_impossible
    parent, key, name = draw.choice(leaves)
    if draw.random() < 0.3:
        del parent[key]
        return f"{name[-60:]} missing", False
    parent[key] = draw.choice(WRONG)
    return f"{name[-60:]} = {str(parent[key])[:30]}", False


def _other_tensor(parent, key, draw):
    tensor = parent[key]
    flat = tensor.flatten()
    sizes = {
        "of one value": flat[:1].clone(),
        "cut in half": flat[: len(flat) // 2].clone(),
        "twice as long": torch.cat([flat, flat]),
        "of 10^10 values": torch.zeros(1).expand(10**10),
        "empty": flat[:0].clone(),
    }
    values = {
        "NaN": torch.full_like(tensor.float(), float("nan")),
        "infinite": torch.full_like(tensor.float(), float("inf")),
        "zero": torch.zeros_like(tensor),
        "large": torch.full_like(tensor.float(), 1e38),
        "negative": -tensor.float().abs() - 1,
        "in 64 bits": tensor.double(),
        "whole numbers": tensor.long(),
        "turned round": tensor.t().contiguous() if tensor.ndim == 2 else tensor,
    }
    what = draw.choice([*sizes, *values])
    parent[key] = sizes[what] if what in sizes else values[what]
    is_other = what in sizes and len(flat) > 1 and parent[key].numel() != len(flat)
    return what, is_other


def _digest(content):
    return hashlib.sha256(content).hexdigest()
