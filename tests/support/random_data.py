"""Data sets drawn by chance: every kind and format, with repeated, joined and rejected rows."""

import random
import shutil

from align.stages.data import files as data_files
from align.stages.pairing import partition
from support.read_rows import write_rows

WORDS = ["alpha", "Beta", "gamma,", "δelta", "  ", "eps\nilon", "42", "is", "yes", "👋", "a" * 40]
KINDS = ("paired", "unpaired", "scored", "scored_long")
ENDINGS = (".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".arrow")


def small_sizes(draw: random.Random):
    """Sizes of slices, ranges and portions, most of them tiny: module, name and size."""
    return [
        (data_files, "LEAST_SLICE", draw.choice([300, 2000, 1 << 21])),
        (data_files, "SLICES", draw.choice([2, 64, 10**6])),
        (partition, "BYTES_PER_RANGE", draw.choice([500, 3000, 8 << 20])),
        (partition, "MOST_RANGES", draw.choice([4, 32])),
        (partition, "ROWS_PER_SHARD", draw.choice([5, 40])),
        (partition, "TOKENS_PER_PORTION", draw.choice([300, 3000, 1 << 22])),
    ]


def draw_files(folder, kind, draw: random.Random, most=100):
    """Some files of one kind of data."""
    folder.mkdir(parents=True)
    files = []
    for number in range(draw.randint(1, 4)):
        path = folder / f"data-{number}{draw.choice(ENDINGS)}"
        rows = _rows(kind, draw.choice([20, most // 3, most]), draw)
        write_rows(path, rows, row_group_size=draw.choice([7, 50, 10_000]))
        files.append(path)
    if draw.random() < 0.2:
        files.append(folder / f"copy{files[0].suffix}")
        shutil.copy(files[0], files[-1])
    return files


def _text(draw):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))


def _rows(kind, count, draw):
    prompts = [
        _text(draw) for _ in range(max(3, draw.choice([count // 5, count, count // 40 + 3])))
    ]
    answers = [_text(draw) for _ in range(max(4, draw.choice([5, count // 4, count])))]
    rows = []
    for _ in range(count):
        rows.append(_row(kind, draw.choice(prompts), answers, draw))
        if draw.random() < 0.1:
            rows.append(dict(rows[-1]))
    return rows


def _row(kind, prompt, answers, draw):
    is_bad = draw.random() < 0.04
    answer = "" if is_bad else draw.choice(answers)
    if kind == "paired":
        return {"prompt": prompt, "chosen": draw.choice(answers), "rejected": answer}
    if kind == "unpaired":
        return {"prompt": prompt, "completion": answer, "label": draw.random() < 0.5}
    if kind == "scored_long":
        prompt += draw.choice(["", "", " "])  # so that some prompts have two tokenizations
        return {"prompt": prompt, "completion": answer, "score": float(draw.randint(0, 3))}
    count = draw.randint(1, 4)
    scores = [float(draw.randint(0, 3)) for _ in range(count - is_bad)]
    completions = [draw.choice(answers) for _ in range(count)]
    return {"prompt": prompt, "completions": completions, "scores": scores}
