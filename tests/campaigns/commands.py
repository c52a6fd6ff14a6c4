"""Gives the commands what strangers wrote: files, folders, paths, settings and words.

Each is a process with nothing on stdin. A case ends well if the process ends by itself within its
time and memory, with 0 or the exit code of one of our errors and a message that can be printed; if
it says no secret, and if nothing beside its own folder has changed.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from campaigns import damaged_data, hostile_settings, runner  # noqa: E402
from campaigns.cases import MOST_MIB, Campaign, End  # noqa: E402
from campaigns.settings import declared  # noqa: E402

from align.schemas import errors  # noqa: E402

CODES = {
    one.exit_code
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.AlignError)
}
STARTED = {"cpu": 8.0, "mib": 900}  # what a command may need that loads torch and a tiny model
SECONDS, PATIENCE = 10, 120
LONGEST = 20_000  # characters
SECRET = "hunter2-is-secret"
CONTROL = re.compile(r"[^\n\t\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f]")
NAMES = (
    *("a\nb", "\x1b[31mred", "-x", "--help", "a\x7fb", "ü✓", "a b", "x" * 250, "..", ".", "~"),
    *("%s{0}", "$HOME", "a'b\"c", "\u202eabc", "a\tb", "\udc80", "CON", "*", "data.parquet\r"),
)
ADDRESSES = (
    f"s3://key:{SECRET}@bucket/a",
    f"https://user:{SECRET}@127.0.0.1:1/a.parquet",
    f"file://user:{SECRET}@h/a",
    *("hf://datasets/a/b", "s3://", "s3://b", "://", "file:///dev/zero", "gs://b/a", "\\\\h\\a"),
)
METHODS = ("dpo", "kto", "orpo", "simpo", "ipo", "no-such", "dpo:2+sft", "", "x" * 3000)


class World:
    """A tiny model and data, made once in a process, and the command that is given."""

    command = (sys.executable, "-m", "align")

    @classmethod
    def prepare(cls, folder):
        """Makes them."""
        cls.folder = folder / "world"
        shutil.rmtree(cls.folder, ignore_errors=True)
        words = ("tiny-world", cls.folder, "--rows", "200")
        subprocess.run([*cls.command, *words], check=True, capture_output=True)
        declared()


def a_path(draw, here):
    """Something in the place of a file or a folder."""
    place = here / f"place {len([*here.iterdir()])}"
    match draw.randrange(12):
        case 0:
            return draw.choice(ADDRESSES)
        case 1:
            return draw.choice(("/dev/zero", "/dev/null", "/proc/self/mem", "/dev/stdin", "/", ""))
        case 2:
            os.mkfifo(place)
        case 3:
            place.symlink_to(draw.choice(("nowhere", place.name, "../outside", "/dev/zero")))
        case 4:
            place.mkdir()
        case 5:
            place.write_bytes(b"")
        case 6:
            place.write_bytes(draw.randbytes(draw.choice((1, 100, 100_000))))
        case 7 | 8:
            name = draw.choice(NAMES)
            if draw.random() < 0.6 and len(name.encode(errors="surrogateescape")) < 200:
                shutil.copy(World.folder / "data/paired.parquet", here / f"{name}.parquet")
                return f"{name}.parquet"
            return name
        case _:
            return _damaged(draw, here)
    return str(place)


def _damaged(draw, here):
    name = draw.choice([name for name in damaged_data.FILES if "/" not in name])
    path = here / name
    path.write_bytes(damaged_data.damaged(damaged_data.FILES[name], draw))
    return str(path)


def a_model(draw, here):
    """The tiny model's folder, at times with a damaged file, or something else."""
    if draw.random() < 0.2:
        return a_path(draw, here)
    model = shutil.copytree(World.folder / "model", here / "model")
    file = draw.choice(sorted(model.iterdir()))
    file.write_bytes(damaged_data.damaged(file.read_bytes(), draw))
    return str(model)


def some_settings(draw, here):
    """Words for --set, or a file for --config."""
    if draw.random() < 0.5:
        words = hostile_settings.words(draw, declared())
        return [part for word in words for part in ("--set", word)]
    return ["--config", a_settings_file(draw, here)]


def a_settings_file(draw, here):
    """A file with a hostile value, or of another shape than settings have."""
    file = here / "settings.yaml"
    if draw.random() < 0.5:
        file.write_bytes(hostile_settings.shape(draw))
    else:
        name = draw.choice([name for name in declared() if not name.startswith("method.")])
        text = hostile_settings.file_of(
            draw, {name: hostile_settings.value(draw, declared()[name])}
        )
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return str(file)


def config_words(draw, here):
    return ["config", *some_settings(draw, here)]


def check_words(draw, here):
    data = a_path(draw, here)
    return ["check", data, *_either(draw, [], ["--model", a_model(draw, here)])]


def model_words(draw, here):
    return ["check", str(World.folder / "data/paired.parquet"), "--model", a_model(draw, here)]


def cache_words(draw, here):
    command = draw.choice(("verify", "inspect", "export"))
    more = ["--output", str(here / "out.parquet")] if command == "export" else []
    return [command, a_path(draw, here), *more]


def train_words(draw, here):
    file = here / "deepspeed.json"
    file.write_bytes(hostile_settings.deepspeed(draw))
    more = _either(draw, ["--deepspeed", str(file)], some_settings(draw, here))
    cache = ["--cache", a_path(draw, here)]
    return [
        draw.choice(("train", "plan", "sweep")),
        "--method",
        draw.choice(METHODS),
        *cache,
        *more,
    ]


def table_words(draw, here):
    command = draw.choice(("score", "judge", "select", "sample"))
    return [command, a_path(draw, here), *_either(draw, [], some_settings(draw, here))]


def rounds_words(draw, here):
    return ["rounds", _either(draw, a_path(draw, here), a_settings_file(draw, here))]


def reference_words(draw, here):
    model = ["--model", a_model(draw, here)]
    return ["precompute-ref", a_path(draw, here), *model, "--output", str(here / "cache")]


def _either(draw, *choices):
    return draw.choice(choices)


KINDS = {
    "config": config_words,
    "check": check_words,
    "model": model_words,
    "cache": cache_words,
    "train": train_words,
    "table": table_words,
    "rounds": rounds_words,
    "reference": reference_words,
}


def name_of(seed):
    """What a command is given."""
    return [*KINDS][seed % len(KINDS)]


def case(seed, folder):
    """Gives a command."""
    if (folder / "case").exists():
        shutil.rmtree(folder / "case")
    here, outside = folder / "case" / "here", folder / "case" / "outside"
    here.mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").write_text("as it is")
    words = KINDS[name_of(seed)](random.Random(seed), here)
    # No process can be given a NUL.
    words = [word.replace("\0", "") for word in words]
    before = _state(folder)
    code, said, seconds, mib = ran(words, here)
    end = _judged(code, said, seconds, mib)
    if _state(folder) != before:
        end = End("wrong", "something outside has changed")
    detail = f"{words!r:.300} {end.detail}"
    return End(end.outcome, detail, round(seconds, 2), round(mib))


def _state(folder):
    """What is there beside the folder of the case."""
    outside = folder / "case" / "outside"
    files = [file for place in (outside, World.folder) for file in sorted(place.rglob("*"))]
    return [(str(file), file.lstat().st_size, file.lstat().st_mtime_ns) for file in files]


def ran(words, here):
    """The exit code of a command, what it said, and what it used; None if it did not end."""
    said, begun = here.parent / "said", time.monotonic()
    environment = os.environ | {"HOME": str(here), "COLUMNS": "80", "NO_COLOR": "1"}
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*World.command, *words],
            cwd=here,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        clock = threading.Timer(PATIENCE, lambda: os.killpg(process.pid, 9))
        clock.start()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        clock.cancel()
    is_late = time.monotonic() - begun >= PATIENCE
    text = said.read_bytes().decode("utf-8", "surrogateescape")
    seconds = used.ru_utime + used.ru_stime
    return None if is_late else process.returncode, text, seconds, used.ru_maxrss / 1024


def _judged(code, said, seconds, mib):
    last = said.strip()[-300:]
    if code is None or seconds > STARTED["cpu"] + SECONDS:
        return End("hang", last)
    if mib > STARTED["mib"] + MOST_MIB:
        return End("memory", last)
    if "Traceback (most recent call last)" in said:
        return End("traceback", last)
    if code not in CODES | {0}:
        return End("crash", f"exit code {code}: {last}")
    if SECRET in said:
        return End("wrong", f"a secret is said: {last}")
    if (sign := CONTROL.search(said)) or len(said) > LONGEST:
        return End("unreadable", f"{len(said)} characters, {sign!r}: {last}")
    if code and not said.strip():
        return End("unnamed", "nothing is said")
    return End("refused" if code else "same", last)


UNCLEAN = """
from align.pipeline.commands import terminal
terminal.safe = str
from align.cli import main
main()
"""


def without_cleaning():
    """Says what it is given as it is, with secrets and control characters."""
    World.command = (sys.executable, "-c", UNCLEAN)


PLANTS = {"cleaning": without_cleaning}
CAMPAIGN = Campaign(__file__, name_of, case, World.prepare, PLANTS)

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
