"""The tables of docs/gpus.md, out of docs/gpus.json: what one GPU measured, and with what.

A day is what one card measured with one set of versions and one state of the code. Each table is of
one day: for each card, the last that measured anything in it.
"""

import json
import re
from itertools import groupby
from pathlib import Path

from bench.gpu_profile import KINDS

TITLES = {
    "large/dpo/recomputed": "align, gradient checkpointing",
    "large/dpo/align": "align as it comes",
    "large/dpo/kept": "align, activations kept, 4k tokens, layers not compiled",
    "large/dpo/kept_compiled": "align, the same, layers compiled",
    "large/dpo/trl": "TRL as it comes (gradient checkpointing)",
    "full/dpo/bfloat16": "align, `zero2`, optimizer in bfloat16, gradient checkpointing",
    "full/dpo/offload": "align, `zero2-offload`, gradient checkpointing",
    "small/dpo/align": "align",
    "small/dpo/asked": "align, `zero2`, states in bfloat16, `train.memory=8g`",
    "small/dpo/trl": "TRL as it comes (reference beside it, gradient checkpointing)",
    "small/dpo/trl_kept": "TRL, activations kept",
    "small/dpo/trl_precomputed": "TRL, activations kept, reference precomputed",
    "small/dpo/trl_tuned": "TRL, the same, with cuDNN's attention switched off",
    "small/kto/align": "align",
    "small/kto/trl": "TRL as it comes",
    "small/kto/trl_tuned": "TRL, activations kept, reference precomputed, without cuDNN",
    "small/orpo/align": "align",
    "small/orpo/trl": "TRL as it comes",
    "small/orpo/trl_kept": "TRL, activations kept",
}
MODELS = {
    "large": "8 billion weights, LoRA",
    "full": "8 billion weights, all trained",
    "small": "0.5 billion weights, all trained",
}
TEST_FILES = {
    "steps": "steps, optimizers, resuming, QLoRA, memory, both stages",
    "attention": "FlexAttention beside dense masks",
    "routers": "mixtures of experts",
    "long_rows": "rows of up to 32k tokens",
    "generate": "sampling's random numbers",
}
NOT_MEASURED = "not measured"
MARK = "<!-- gpu-day: {} -->\n{}<!-- /gpu-day -->"
REGION = re.compile(r"<!-- gpu-day: (\w+) -->\n(.*?)<!-- /gpu-day -->", re.DOTALL)


def write(docs, found, parts):
    """Puts days into the JSON, and the JSON into the page."""
    file, page = docs / "gpus.json", docs / "gpus.md"
    days = merged(json.loads(file.read_text(encoding="utf-8"))["days"], found)
    file.write_text(json.dumps({"days": days}, indent=1) + "\n", encoding="utf-8")
    page.write_text(filled(page.read_text(encoding="utf-8"), days, parts), encoding="utf-8")


def preview(docs, folder, days, parts):
    """The page as it would be with these days alone, beside their records."""
    text = filled((docs / "gpus.md").read_text(encoding="utf-8"), days, parts)
    (folder / "gpus.md").write_text(text, encoding="utf-8")
    print(f"the page as these figures make it: {folder / 'gpus.md'}")


def days_in(root):
    """The days of all records under a folder; those of CPUs are tries."""
    found = []
    for folder in sorted(path for path in Path(root).iterdir() if path.is_dir()):
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))]
        if texts and (day := day_of({one["part"]: one for one in map(json.loads, texts)})):
            found += [day] if day["device"] != "CPU" else []
    return found


def day_of(records):
    """Records of one machine, versions and code as one day; others are refused."""
    if len({key_of(record) for record in records.values()}) != 1:
        raise SystemExit("records of several machines, versions or states of the code in one place")
    last = max(records.values(), key=lambda record: record["measured"])
    figures = {}
    for name, record in sorted(records.items()):
        figures[name] = record.get("figures") or {"missed": record["missed"]}
    named = ("device", "versions", "source", "commit", "measured")
    return {name: last[name] for name in named} | {"figures": figures}


def key_of(day):
    return json.dumps([day["device"], day["versions"], day["source"]], sort_keys=True)


def merged(days, found):
    """Days with others put in, oldest first; one of which no table is shown is left out."""
    by_key = {key_of(day): day for day in (*days, *found)}
    everything = sorted(by_key.values(), key=lambda day: day["measured"])
    used = [day for name in TABLES for day in shown(name, everything)]
    return [day for day in everything if day in used]


def shown(name, days):
    """For each card the last day that has figures in a table."""
    wanted, last = set(rows_of(name)), {}
    for day in sorted(days, key=lambda day: day["measured"]):
        if any("missed" not in day["figures"].get(one, {"missed": ""}) for one in wanted):
            last[card_of(day["device"])] = day
    return list(last.values())


def card_of(device):
    """`H100` of what a driver calls it, which has changed; the whole where it has no such word."""
    found = re.search(r"\b[A-Z]+\d+\b", device)
    return found[0] if found else device


def filled(text, days, parts):
    """The page with its marked regions made anew."""
    made = {name: rendered(name, days) for name in TABLES} | {"parts": planned(parts)}
    return REGION.sub(lambda found: MARK.format(found[1], made[found[1]]), text)


def planned(parts):
    """How long each part takes, and from which second on it is killed."""
    rows = [[one.name, f"{one.expected} s", f"{one.limit} s", one.needs] for one in parts]
    return f"{table(['part', 'planned', 'at most', 'reads the files of'], rows)}\n"


def rendered(name, days):
    tables = [f"{caption(day)}\n\n{TABLES[name](day['figures'])}\n" for day in shown(name, days)]
    return "\n".join(tables) or f"{NOT_MEASURED.capitalize()} yet.\n"


def caption(day):
    versions = [f"{name} {number}" for name, number in day["versions"].items() if number]
    when = day["measured"][:10]
    code = f"commit {day['commit']}" if day["commit"] else ""
    return f"On one {', '.join(filter(None, (day['device'], *versions, when, code)))}:"


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def missing(figures, columns):
    """The cells of what is not there: the reason, or that it was not measured."""
    reason = f"missed: {figures['missed']}" if figures else NOT_MEASURED
    return [reason.replace("|", "/"), *[""] * (columns - 1)]


def has(figures, name):
    return figures.get(name) is not None


def cell(figures, name, form):
    return form.format(figures[name]) if has(figures, name) else ""


def speed(figures):
    heads = ["", "tokens/s", "MFU", "peak", "first step", "align is"]
    rows = []
    for group, names in groupby(TITLES, key=lambda name: name.rpartition("/")[0]):
        model, method = group.split("/")
        ours = ""
        for index, name in enumerate(names):
            found = figures.get(name, {})
            title = f"**{MODELS[model]}, {method.upper()}**: " if not index else ""
            title += TITLES[name]
            if not has(found, "rate"):
                rows.append([title, *missing(found, 5)])
                continue
            is_ours = "trl" not in name
            ours = ours or (name if is_ours else "")
            ratio = figures[ours]["rate"] / found["rate"] if ours and not is_ours else None
            cells = [cell(found, "rate", "{:,.0f}"), cell(found, "mfu", "{:.1f} %")]
            cells += [cell(found, "peak_gib", "{:.1f} GiB"), cell(found, "first", "{:.0f} s")]
            rows.append([title, *cells, f"{ratio:.1f}x" if ratio else ""])
    return table(heads, rows)


def stage_one(figures):
    heads = ["", "tokens/s", "MFU", "tokens/s with loading", "MFU with loading", "peak"]
    rows = []
    for model in ("large", "small"):
        found = figures.get(f"{model}/stage1", {})
        cells = [cell(found, "rate", "{:,.0f}"), cell(found, "mfu", "{:.0f} %")]
        cells += [cell(found, "rate_with_loading", "{:,.0f}")]
        cells += [
            cell(found, "mfu_with_loading", "{:.0f} %"),
            cell(found, "peak_gib", "{:.1f} GiB"),
        ]
        title = MODELS[model].partition(",")[0]
        rows.append([title, *(cells if any(cells) else missing(found, 5))])
    return table(heads, rows)


def memory(figures):
    rows = []
    for name in (one for one in TITLES if "trl" not in one):
        found = figures.get(name, {})
        model, method, _ = name.split("/")
        title = f"{MODELS[model]}, {method.upper()}: {TITLES[name]}"
        if not has(found, "planned_gib"):
            rows.append([title, *missing({} if has(found, "rate") else found, 3)])
            continue
        cells = [f"{found['planned_gib']:.1f} GiB"]
        if has(found, "peak_gib"):
            off = found["planned_gib"] / found["peak_gib"] - 1
            cells += [f"{found['peak_gib']:.1f} GiB", f"{off:+.1%}"]
        else:
            cells += missing({}, 2)
        rows.append([title, *cells])
    return table(["", "planned", "measured", "off by"], rows)


def profile(figures):
    found = figures.get("large/dpo/profile", {})
    if "missed" in found or not found:
        return f"{missing(found, 1)[0]}"
    rows = []
    for kind, title in KINDS.items():
        one = found["kinds"][kind]
        share = one["seconds"] / found["busy"]
        rows.append(
            [title, f"{share:.0%}", f"{one['seconds']:.2f} s", cell(one, "kernels", "{:,}")]
        )
    waits = found.get("waits")
    said = [f"{count} x {place}" for place, count in waits.items()] if waits else [NOT_MEASURED]
    rows.append(["all of it", "100%", f"{found['busy']:.2f} s", ""])
    return (
        f"{table(['', 'share', 'time', 'kernels'], rows)}\n\nWaits of the host: {'; '.join(said)}."
    )


def tests(figures):
    rows = []
    for name, title in TEST_FILES.items():
        found = figures.get(f"tests/{name}", {})
        rows.append([title, found["outcome"] if "outcome" in found else missing(found, 1)[0]])
    return table(["", ""], rows)


TABLES = {
    "speed": speed,
    "stage1": stage_one,
    "memory": memory,
    "profile": profile,
    "tests": tests,
}


def rows_of(name):
    """The parts of a table."""
    if name == "stage1":
        return ["large/stage1", "small/stage1"]
    if name == "tests":
        return [f"tests/{one}" for one in TEST_FILES]
    if name == "profile":
        return ["large/dpo/profile"]
    return [one for one in TITLES if name == "speed" or "trl" not in one]
