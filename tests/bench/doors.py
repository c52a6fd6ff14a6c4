"""What files, chat templates, tokens and models cost to take in, beside an earlier commit.

    PYTHONPATH=.. python tests/bench/doors.py --before FOLDER

FOLDER is a checkout of the earlier commit, whose folder is called `align`, too. Each of the two has
a process of its own, and both do each job in turns, so that what else the machine does meets them
alike. Seconds are of the wall; those of processors include the process that renders templates.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sides

ALIGN = Path(__file__).parents[2]
WORDS = ("the", "of", "alpha", "beta", "gamma", "delta", "a", "in")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def main():
    # Vocabulary and width are of the model that is loaded: as they are, it has 80 MB.
    given = sides.options_of(
        __doc__,
        before=None,
        rounds=9,
        rows=2000,
        vocabulary=128_000,
        width=128,
        jobs=tuple(JOBS),
    )
    with tempfile.TemporaryDirectory() as name:
        sides.called(make, name, given.rows, given.vocabulary, given.width)
        both = [started(checkout, name) for checkout in (given.before.absolute(), ALIGN)]
        print(
            f"{'medians':12}{'before s':>10}{'now s':>10}{'ratio':>8}{'least':>8}{'processor':>11}"
        )
        for job in given.jobs:
            print(line(job, both, given.rounds), flush=True)
        for process in both:
            process.stdin.close()
            process.wait()


def line(job, both, rounds):
    """A job's medians, its ratio, and those of the least seconds and of processors' seconds."""
    for process in both:
        told(process, job)  # imports what is imported late
    sampled = [], []
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            sampled[index].append(told(both[index], job))
    before, now = (statistics.median(wall for wall, _ in each) for each in sampled)
    ratios = [now[0] / before[0] for before, now in zip(*sampled, strict=True)]
    least = [min(wall for wall, _ in each) for each in sampled]
    used = [max(0.01, sum(used for _, used in each)) for each in sampled]
    cells = (statistics.median(ratios), least[1] / least[0], used[1] / used[0])
    return f"{job:12}{before:10.3f}{now:10.3f}{cells[0]:8.2f}{cells[1]:8.2f}{cells[2]:11.2f}"


def started(checkout, folder):
    return subprocess.Popen(
        [sys.executable, __file__, "--serve", folder],
        env=os.environ | {"PYTHONPATH": f"{checkout.parent}", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def told(process, job):
    """Seconds of the wall and of processors that a side takes for a job."""
    process.stdin.write(f"{job}\n")
    process.stdin.flush()
    return tuple(map(float, process.stdout.readline().split()))


def make(folder, rows, vocabulary, width):
    """Pairs of plain text and of messages as files, and a model."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)

    def text(most):
        return " ".join(draw.choices(WORDS, k=draw.randrange(most // 4, most)))

    def said(role, most):
        return {"role": role, "content": text(most)}

    plain = [
        {"prompt": text(100), "chosen": f" {text(200)}", "rejected": f" {text(200)}"}
        for _ in range(rows * 4)
    ]
    turns = [
        {
            "prompt": [said("user", 60), said("assistant", 120), said("user", 60)],
            "chosen": [said("assistant", 120)],
            "rejected": [said("assistant", 120)],
        }
        for _ in range(rows)
    ]
    root = Path(folder)
    for name, table in (("plain", plain), ("chats", turns)):
        pq.write_table(pa.Table.from_pylist(table), root / f"{name}.parquet", row_group_size=1000)
    (root / "plain.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in plain))
    shape = (width, 4, 4, 2, width * 3)
    sides.make_model(root / "model", shape, vocabulary)
    sides.save_tokenizer(root / "model", byte_pairs(vocabulary))
    (root / "model" / "chat_template.jinja").write_text(TEMPLATE)


def byte_pairs(vocabulary):
    """A tokenizer that merges pairs of bytes, by rules that are drawn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    draw = random.Random(1)
    tokens = dict.fromkeys([*sides.SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    parts, rules = [*tokens][len(sides.SPECIALS) :], []
    while len(tokens) < vocabulary:
        first, second = draw.choice(parts), draw.choice(parts)
        if first + second not in tokens and len(first + second) < 16:
            tokens[first + second] = None
            parts.append(first + second)
            rules.append((first, second))
    numbers = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(numbers, rules))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def serve(folder):
    """Does the jobs whose names are read, and tells what each has taken."""
    jobs = {}
    for name in map(str.strip, sys.stdin):
        if name not in jobs:
            jobs[name] = JOBS[name](folder)
        job = jobs[name]
        begun, used = time.perf_counter(), processor_seconds()
        job()
        print(time.perf_counter() - begun, processor_seconds() - used, flush=True)


def processor_seconds():
    """Of this process and those that it has started."""
    import psutil

    own = psutil.Process()
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def records_of(path):
    """The chunks of a file, and the records of each as they are asked for."""
    from align.stages.data.data_schema import common_shape
    from align.stages.data.decode_rows import parse_chunk
    from align.stages.data.input_files import iter_chunks, open_inputs

    inputs = open_inputs([path])
    shape = common_shape(inputs, {})
    for chunk in iter_chunks(inputs, shape.columns):
        yield lambda chunk=chunk: parse_chunk(chunk, shape)[0]


def reading(file):
    """A job that reads a file, as far as its chunks."""
    return lambda folder: lambda: sum(1 for _ in records_of(f"{folder}/{file}"))


def parsing(file):
    """A job that reads a file and checks its rows."""
    return lambda folder: lambda: sum(len(records()) for records in records_of(f"{folder}/{file}"))


def with_tokenizer(job_of):
    """A job on the records that are conversations, made by `job_of(tokenizer, records)`."""

    def opened(folder):
        from align.schemas.data_options import TokenOptions
        from align.stages.data.tokenizer import load_tokenizer

        chunks = records_of(f"{folder}/chats.parquet")
        records = [record for records in chunks for record in records()]
        return job_of(load_tokenizer(f"{folder}/model", TokenOptions()), records)

    return opened


def encoding(tokenizer, records):
    from align.schemas.data_options import TokenOptions
    from align.stages.data.encode import Encoder

    encoder = Encoder(tokenizer, TokenOptions())
    return lambda: encoder.encode(records)


def rendering(tokenizer, records):
    """Rendering alone, in batches as large as the encoder's; once, a record after the other."""
    if hasattr(tokenizer, "render"):
        return lambda: [tokenizer.render(record) for record in records]

    def batches():
        for start in range(0, len(records), 32):
            batch = [tokenizer.conversation(record) for record in records[start : start + 32]]
            yield batch, [request for one in batch for request in one.requests()]

    return lambda: [one.texts() for batch in tokenizer.chat.ahead(batches()) for one in batch]


def load_tokenizer_of(folder):
    from align.schemas.data_options import TokenOptions
    from align.stages.data.tokenizer import load_tokenizer

    return lambda: load_tokenizer(f"{folder}/model", TokenOptions())


def load_model_of(folder):
    from align.schemas.config import ModelOptions
    from align.stages.model.loading.load import load_causal_lm

    return lambda: load_causal_lm(ModelOptions(path=f"{folder}/model", device="cpu"))


JOBS = {
    "parquet": parsing("plain.parquet"),
    "chats": parsing("chats.parquet"),
    "jsonl": parsing("plain.jsonl"),
    "chunks": reading("plain.parquet"),
    "chatchunks": reading("chats.parquet"),
    "templates": with_tokenizer(rendering),
    "tokens": with_tokenizer(encoding),
    "tokenizer": load_tokenizer_of,
    "model": load_model_of,
}

if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else main()
