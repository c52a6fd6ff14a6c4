"""Files of two runs as texts that are equal where nothing but time and chance differs."""

import hashlib
import re
import sqlite3

# Locks, drafts of what was killed, stores of trackers, and what is kept for this machine.
SKIPPED = re.compile(r"(?:^|/)(?:home|__pycache__|mlruns)/|(?:^|/)mlflow\.db|\.lock$|\.tmp$")
# Times, speeds, names drawn at random and digests of such, in a file whose name ends so.
MEASURED = r"(?:speed|memory)/\w+"
DIGESTS = r'"(?:digest|sha256)":"\w*"'
TIMED = r"metrics\.jsonl|model/README\.md"  # files whose length is that of their times too
OF_STORES = r"\w+_ms|key|metrics_sent|model_id|run_id|mlflow\.parentRunId"
MASKS = {
    r"\.jsonl$": rf'"(?:time|{MEASURED})":[^,}}]+',
    r"\.html$": r"<svg.*?</svg>|\b[0-9a-f]{32}\b|\d[\d.,:]*",
    r"said\.txt$": r"in [\d.,]+ s\b|\b[0-9a-f]{32}\b",
    r"_align/mlflow\.json$": rf'"(?:{OF_STORES})":[^,}}]+|{DIGESTS}',
    r"model/README\.md$": rf"\b(?:[0-9a-f]{{32}}|[0-9a-f]{{16}})\b|{MEASURED} \| \S+",
    r"_align/(?:ending|model)\.json$": rf'"bytes":\d+,"path":"(?:{TIMED})"|{DIGESTS}',
    r"(?:align_checkpoint|step-\d+)\.json$": rf'"(?:bytes|journal|{MEASURED})":[^,}}]+|{DIGESTS}',
    r"adapter_config\.json$": r'"target_modules": \[.*?\]',  # a set, in any order
}
UNEQUAL = ("speed/", "memory/", "tokens_per_second", "mlflow.", "align.run_key")


def files_in(folder):
    """The names of all files below a folder but those that no two runs share."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if not SKIPPED.search(name)]


def readable(path, name):
    """A file's text without what no two runs share; of other bytes the digest."""
    if not path.is_file():
        return "missing"
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"sha256 {hashlib.sha256(content).hexdigest()}"
    for kind, pattern in MASKS.items():
        if re.search(kind, name):
            text = re.sub(pattern, "#", text, flags=re.DOTALL)
    return text


def lines(text):
    """Lines that a person can compare, also of JSON and HTML written in one."""
    return re.sub(r',(?=")|(?=<(?:tr|td|p|h\d))', "\n", text).splitlines()


def told_to_mlflow(folder):
    """What the stores below a folder hold of their runs, but times and ids."""
    found = []
    for path in sorted(folder.rglob("mlflow.db")):
        with sqlite3.connect(path) as store:
            for table, step in (("params", "''"), ("tags", "''"), ("metrics", "step")):
                query = f"select name, key, {step}, value from {table} join runs using (run_uuid)"
                rows = [row for row in store.execute(query) if not row[1].startswith(UNEQUAL)]
                found += [" ".join(map(str, (table, *row))) for row in rows]
            for run, name in store.execute("select run_uuid, name from runs"):
                sent = path.parent / "mlruns" / "align" / run / "artifacts"
                names = [one.relative_to(sent) for one in sent.rglob("*") if one.is_file()]
                found += [f"artifact {name} {one}" for one in names]
    return "\n".join(sorted(found))
