"""Cache folders that are damaged by chance, as they are or signed anew, and what they hold."""

import hashlib
import json
import math
import shutil
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from campaigns.damaged_tables import VOCABULARY, other_table

from align.schemas.config import CacheOptions, Config, ModelOptions, TrackingOptions
from align.schemas.data_options import DataOptions, TokenOptions
from align.schemas.errors import UsageError
from align.stages.demo.preferences import draw_preferences, paired, scored, unpaired
from align.stages.demo.tiny_tokenizer import make_tokenizer
from support.damaged_models import elsewhere, other_bytes, other_json
from support.stage_one import run
from support.stub_reference import StubReference, StubScorer

FILES = {"pairs": paired, "labels": unpaired, "scores": scored}
UNFINISHED = "unfinished"  # one whose making was broken off
ROWS = 12


class Breaking(StubReference):
    """Scores a few batches and refuses the next."""

    def open(self):
        """There is nothing to load."""
        return BreakingScorer(salt=1)


class BreakingScorer(StubScorer):
    """Scores two batches."""

    scored = 0

    def score(self, trees):
        """Scores one batch."""
        type(self).scored += 1
        if type(self).scored > 2:
            raise UsageError("no more")
        return super().score(trees)


def config_of(root, name, output):
    """The settings of the cache of a data file."""
    return Config(
        model=ModelOptions(path=str(root / "tokenizer")),
        data=DataOptions(files=[str(root / f"{name}.parquet")], max_bad_frac=0.5),
        tokens=TokenOptions(max_length=256),
        cache=CacheOptions(
            output=str(output),
            rows_per_shard=4,
            token_logps=name != "labels",
            kl_pairs=0 if name == "scores" else 1,
            reuse_known=False,
        ),
        tracking=TrackingOptions(mlflow=False),
    )


def make_caches(root):
    """Caches of each kind of rows, and one that is not finished, by name."""
    make_tokenizer(root / "tokenizer")
    preferences = list(draw_preferences(ROWS, seed=1))
    for name, table_of in FILES.items():
        table = table_of(preferences)
        bad = {
            key: "" if table.schema.field(key).type == pa.string() else value
            for key, value in table.slice(0, 1).to_pylist()[0].items()
        }
        worse = pa.Table.from_pylist([bad], schema=table.schema)
        pq.write_table(pa.concat_tables([table, worse]), root / f"{name}.parquet")
        run(config_of(root, name, root / name))
    shutil.copy(root / "pairs.parquet", root / f"{UNFINISHED}.parquet")
    try:
        run(config_of(root, UNFINISHED, root / UNFINISHED), Breaking())
    except UsageError:
        return [*FILES, UNFINISHED]
    raise AssertionError("it was to be broken off")


@dataclass(frozen=True)
class Damage:
    """What was done to a folder."""

    what: str
    files: tuple  # names, of which a message has to have one
    is_signed: bool = False  # its digests were made to fit


def damage(cache, draw):
    """Damages a file of a cache."""
    if draw.random() < 0.55 and (cache / "manifest.json").exists():
        return _signed_damage(cache, draw)
    files = sorted(path for path in cache.rglob("*") if path.is_file() and path.name != "LOCK")
    file = draw.choice(files)
    if (cache / "manifest.json").exists() and draw.random() < 0.3:
        file = cache / "manifest.json"
    names, content = (file.name,), file.read_bytes()
    way = draw.random()
    if way < 0.12:
        other = draw.choice(files)
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return Damage(f"{file.name} and {other.name} swapped", (file.name, other.name))
    if way < 0.3:
        return Damage(f"{file.name}: {in_its_place(file, cache, draw)}", (*names, str(file.parent)))
    if file.suffix == ".json" and way < 0.8:
        what, content = other_json(content, json.loads(content), "", draw)
        if draw.random() < 0.5:
            content = signed_record(content)
            what += ", signed"
    else:
        what, content = other_bytes(content, draw)
    file.write_bytes(content)
    return Damage(f"{file.name}: {what}", names)


def in_its_place(file, root, draw):
    """Puts something else in the place of a file of a folder, or of the folder that it is in."""
    way = draw.randrange(4)
    if way == 0:
        outside = root.parent / "outside"
        file.rename(outside)
        file.symlink_to(outside)
        return "a link to the same bytes"
    if way == 1:
        file.unlink()
        file.symlink_to(draw.choice(["/dev/zero", "/etc/passwd", file.name, "/dev/stdin"]))
        return "a link elsewhere"
    if way == 2:
        folder = file.parent
        if folder == root:
            return elsewhere(file, draw)
        outside = root.parent / "outside"
        folder.rename(outside)
        folder.symlink_to(outside)
        return "in a folder that is a link"
    return elsewhere(file, draw)


def _signed_damage(cache, draw):
    """Damages a shard, or the manifest itself, and signs the cache anew."""
    manifest = json.loads((cache / "manifest.json").read_bytes())
    way = draw.random()
    if way < 0.2:
        del manifest["root"]
        what, content = other_json(json.dumps(manifest).encode(), manifest, "", draw)
        (cache / "manifest.json").write_bytes(content)
        _sign(cache, json.loads(content)) if is_object(content) else None
        return Damage(f"manifest.json: {what}", _names(cache), is_signed=True)
    entry = draw.choice(manifest["shards"])
    path, folder = cache / "data" / entry["file"], "data"
    if way < 0.28 and manifest["quarantine"]:
        entry = manifest["quarantine"][0]
        path, folder = cache / entry["file"], "quarantine"
    if way < 0.4:
        what, content = other_bytes(path.read_bytes(), draw)
        path.write_bytes(content)
    elif way < 0.45:
        other = draw.choice(sorted(cache.parent.parent.glob("bases/*/data/*")))
        what = f"the shard {other.parent.parent.name}/{other.name}"
        shutil.copy(other, path)
    else:
        what = other_table(path, draw)
    final = path.with_name(f"{path.name[:14]}{_sha256(path)[:16]}.parquet")
    path.rename(final)
    stated = {"bytes": final.stat().st_size, "sha256": _sha256(final)}
    before = dict(entry)
    entry |= {**stated, "file": final.name if folder == "data" else f"{folder}/{final.name}"}
    if folder == "quarantine":
        for shard in manifest["shards"]:
            shard["quarantine"] = [entry if one == before else one for one in shard["quarantine"]]
    elif draw.random() < 0.7:
        _count(entry, final)
        for total in ("rows", "branches", "tokens"):
            manifest[total] = sum(shard[total] for shard in manifest["shards"])
    _sign(cache, manifest)
    return Damage(f"{final.name}: {what}", _names(cache), is_signed=True)


def _names(cache):
    found = [path.name for path in cache.rglob("*") if path.is_file() or path.is_symlink()]
    return (str(cache), "manifest.json", *found, *(f"unit {unit}" for unit in range(9)))


def is_object(content):
    """Whether bytes are a JSON object."""
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(plain):
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")) + "\n"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _canonical(plain):
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")) + "\n"
    return text.encode("utf-8", "surrogatepass")


def signed_record(content):
    """A record with a digest over all other fields."""
    if not is_object(content):
        return content
    plain = {name: value for name, value in json.loads(content).items() if name != "digest"}
    return _canonical(plain | {"digest": _digest(plain)})


def _sign(cache, manifest):
    """Writes a manifest as its own writer would, whatever it says."""
    shards = manifest.get("shards")
    for shard in shards if isinstance(shards, list) else []:
        if isinstance(shard, dict):
            shard["digest"] = _digest({n: v for n, v in shard.items() if n != "digest"})
    unsigned = {"root", "align_version", "model", "adapter", "sampling"}
    manifest["root"] = _digest({n: v for n, v in manifest.items() if n not in unsigned})
    (cache / "manifest.json").write_bytes(_canonical(manifest))


def _count(entry, path):
    """Describes a shard as its writer would, where that can be said in JSON."""
    try:
        file = pq.ParquetFile(path)
        rows = file.read().to_pylist()
        logps = [logp for row in rows for logp in row["ref_logp"]]
        found = {
            "rows": len(rows),
            "branches": len(logps),
            "tokens": sum(len(ids) for row in rows for ids in row["completion_ids"]),
            "row_groups": file.num_row_groups,
            "ids_digest": hashlib.sha256(
                "".join(f"{row['row_id']}\n" for row in rows).encode()
            ).hexdigest(),
        }
        sums = {"logp_sum": math.fsum(logps), "logp_min": min(logps), "logp_max": max(logps)}
    except (KeyError, TypeError, ValueError, OverflowError, OSError, pa.ArrowException):
        return
    if all(map(math.isfinite, sums.values())):
        found |= sums
    entry |= found


def rows_in(cache, columns=None):
    """What the shards of a folder hold, as another reader finds it."""
    manifest = json.loads((cache / "manifest.json").read_bytes())
    files = [cache / "data" / one["file"] for one in manifest["shards"]]
    tables = [pq.read_table(file, columns=columns) for file in files]
    return [row for table in tables for row in table.to_pylist()]


def faults_of(rows, *, is_scored):
    """What of these rows no model can have made, or cannot score where one is given them."""
    for row in rows:
        completions = row.get("completion_ids", ())
        ids = [*row.get("prompt_ids", ()), *(one for each in completions for one in each)]
        if any(not 0 <= one < (VOCABULARY if is_scored else 2**31) for one in ids):
            yield f"an id of {min(ids)} to {max(ids)}"
        logps = [*row["ref_logp"], *(x for one in row.get("ref_token_logps", []) for x in one)]
        if not all(map(math.isfinite, logps)):
            yield "a log-prob that is not finite"
        if any(not 0 <= role <= 5 for role in row["role"]):
            yield f"roles {row['role']}"
