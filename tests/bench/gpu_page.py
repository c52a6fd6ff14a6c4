"""The tables of docs/gpus.md, out of docs/gpus.json: what one GPU measured, and with what.

The JSON holds the last record of each part on each card, with the versions and the commit that it
was measured with. A table is of one card, one set of versions and one state of the code: parts that
were measured with others stand in a table of their own.
"""

import json
import re
from itertools import groupby
from pathlib import Path, PurePosixPath

from bench.gpu_profile import KINDS
from bench.timed_parts import LONGEST_REASON

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
    "compiled": "compiled layers beside the model's own",
    "waits": "stage 1 queues a batch without a wait",
    "steps": "steps, optimizers, resuming, QLoRA, memory, both stages",
    "attention": "FlexAttention beside dense masks",
    "routers": "mixtures of experts",
    "long_rows": "rows of up to 32k tokens",
    "generate": "sampling's random numbers",
    "several": "several GPUs beside one",
}
NOT_MEASURED = "not measured"
# Of a path of the machine the page has the last name alone; one in quotes may hold spaces.
MACHINE_PATH = re.compile(r"""(?<=')/[^']+(?=')|(?<=")/[^"]+(?=")|(?<![\w./])/[^\s'"`<>()|,;:]+""")
MARK = "<!-- gpu-day: {} -->\n{}<!-- /gpu-day -->"
REGION = re.compile(r"<!-- gpu-day: (\w+) -->\n(.*?)<!-- /gpu-day -->", re.DOTALL)


def write(docs, found, every, usual):
    """Puts records into the JSON, and the JSON into the page, which plans the `usual` parts."""
    file, page = docs / "gpus.json", docs / "gpus.md"
    known = json.loads(file.read_text(encoding="utf-8"))["records"]
    kept = merged(current([*known, *found], every))
    lines = ",\n".join(f"  {json.dumps(record)}" for record in kept)
    file.write_text(f'{{\n "records": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    page.write_text(filled(page.read_text(encoding="utf-8"), kept, usual), encoding="utf-8")


def preview(docs, folder, found, every, usual):
    """The page as it would be with these records alone, beside them."""
    text = (docs / "gpus.md").read_text(encoding="utf-8")
    made = filled(text, merged(current(found, every)), usual)
    (folder / "gpus.md").write_text(made, encoding="utf-8")
    print(f"the page as these figures make it: {folder / 'gpus.md'}")


def records_in(root):
    """All records under a folder as they may be published; those of CPUs are tries."""
    found = []
    for path in sorted(Path(root).glob("*/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["device"] != "CPU":
            found.append(
                record | ({"missed": told(record["missed"])} if "missed" in record else {})
            )
    return found


def told(reason):
    """The reason of a miss for a page: a line without the folders of a machine."""
    line = " ".join(reason.split())
    return MACHINE_PATH.sub(lambda path: PurePosixPath(path[0]).name, line)[:LONGEST_REASON]


def current(records, parts):
    """Those measured with the settings that their part has now; of the others it tells.

    A record that was put into the JSON by hand may be without settings.
    """
    now, kept = {part.name: [*part.words] for part in parts}, []
    for record in records:
        name = record["part"]
        if name in now and record.get("words", now[name]) == now[name]:
            kept.append(record)
        else:
            print(f"{name}, measured {record['measured']}, is left out: it has other settings now")
    return kept


def merged(records):
    """The last record of each part on each card; a miss takes no figures' place, and says so."""
    last = {}
    for one in sorted(records, key=lambda one: one["measured"]):
        place = card_of(one["device"]), one["part"]
        if "missed" in one and "figures" in last.get(place, {}):
            print(f"{one['part']}: missed since, the figures of {last[place]['measured']} stay")
        else:
            last[place] = one
    return [last[place] for place in sorted(last)]


def card_of(device):
    """`H100` of what a driver calls it, which has changed; the whole where it has no such word."""
    found = re.search(r"\b[A-Z]+\d+\b", device)
    return found[0] if found else device


def shown(name, records):
    """The tables of a name: for each the rows, and the records of some of them by part.

    For each card that has any figures, by state of versions and code, the last first, which has the
    rows that are in none of the others.
    """
    tables, rows = [], rows_of(name)
    own = sorted((one for one in records if one["part"] in rows), key=lambda one: one["measured"])
    for card in dict.fromkeys(card_of(one["device"]) for one in own):
        states = {}
        for record in (one for one in reversed(own) if card_of(one["device"]) == card):
            states.setdefault(state_of(record), {})[record["part"]] = record
        if any("figures" in one for state in states.values() for one in state.values()):
            newest, *others = states.values()
            elsewhere = {part for state in others for part in state}
            tables.append(([row for row in rows if row not in elsewhere], newest))
            tables += [([row for row in rows if row in state], state) for state in others]
    return tables


def state_of(record):
    return json.dumps([record["device"], record["versions"], record["source"]], sort_keys=True)


def filled(text, records, parts):
    """The page with its marked regions made anew."""
    made = {name: rendered(name, records) for name in TABLES} | {"parts": planned(parts)}
    return REGION.sub(lambda found: MARK.format(found[1], made[found[1]]), text)


def planned(parts):
    """How long each part takes, and from which second on it is killed."""
    rows = [[one.name, f"{one.expected} s", f"{one.limit} s", one.needs] for one in parts]
    return f"{table(['part', 'planned', 'at most', 'reads the files of'], rows)}\n"


def rendered(name, records):
    tables = []
    for rows, state in shown(name, records):
        found = {
            part: one.get("figures") or {"missed": one["missed"]} for part, one in state.items()
        }
        tables.append(f"{caption([*state.values()])}\n\n{TABLES[name](found, rows)}\n")
    return "\n".join(tables) or f"{NOT_MEASURED.capitalize()} yet.\n"


def caption(records):
    """With what the records of a state were measured; commits may differ in other files."""
    first = records[0]
    versions = [f"{name} {number}" for name, number in first["versions"].items() if number]
    days = sorted({record["measured"][:10] for record in records})
    commits = sorted({record["commit"] for record in records} - {""})
    code = f"commit {' and '.join(commits)}" if commits else ""
    words = (first["device"], *versions, " and ".join(days), code)
    return f"On one {', '.join(filter(None, words))}:"


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


def speed(figures, names):
    heads = ["", "tokens/s", "MFU", "peak", "first step", "align is"]
    rows = []
    for group, sides in groupby(names, key=lambda name: name.rpartition("/")[0]):
        model, method = group.split("/")
        ours = ""
        for index, name in enumerate(sides):
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


def stage_one(figures, names):
    heads = ["", "tokens/s", "MFU", "tokens/s with loading", "MFU with loading", "peak"]
    rows = []
    for name in names:
        found = figures.get(name, {})
        cells = [cell(found, "rate", "{:,.0f}"), cell(found, "mfu", "{:.0f} %")]
        cells += [cell(found, "rate_with_loading", "{:,.0f}")]
        cells += [
            cell(found, "mfu_with_loading", "{:.0f} %"),
            cell(found, "peak_gib", "{:.1f} GiB"),
        ]
        title = MODELS[name.partition("/")[0]].partition(",")[0]
        rows.append([title, *(cells if any(cells) else missing(found, 5))])
    return table(heads, rows)


def memory(figures, names):
    rows = []
    for name in names:
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


def profile(figures, names):
    found = figures[names[0]]
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
        f"{profiled(found)}\n\n{table(['', 'share', 'time', 'kernels'], rows)}\n\n"
        f"Waits of the host: {'; '.join(said)}."
    )


def profiled(found):
    """Which policy a profile is of, as it was while it ran."""
    if not (has(found, "recomputed") and has(found, "compiled")):
        return "Whether activations were recomputed and layers compiled was not written down."
    kept = "recomputed" if found["recomputed"] else "kept"
    return f"Activations were {kept}, layers {'' if found['compiled'] else 'not '}compiled."


def tests(figures, names):
    rows = []
    for name in names:
        found, title = figures.get(name, {}), TEST_FILES[name.partition("/")[2]]
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
