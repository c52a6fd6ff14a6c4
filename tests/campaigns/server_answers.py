"""Draws what servers answer, most of it hostile, and samples and judges by them as the commands do.

A case ends well if every value in the table is that of a right answer, as another reader of the
answers finds it, and no answer was asked for again; or if one message names the server.
"""

import json
import logging
import os
import random
import shutil
import socketserver
import sys
import threading
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import pyarrow.parquet as pq  # noqa: E402
from campaigns import hostile_answers, hostile_http, runner  # noqa: E402
from campaigns.cases import Campaign, End, tried  # noqa: E402
from campaigns.hostile_answers import KEY  # noqa: E402

from align.pipeline.tables.judge import judge  # noqa: E402
from align.pipeline.tables.sample import sample  # noqa: E402
from align.schemas.config import Config, TrackingOptions  # noqa: E402
from align.schemas.data_options import DataOptions  # noqa: E402
from align.schemas.errors import AlignError  # noqa: E402
from align.schemas.round_options import JudgeOptions, SampleOptions, ServerOptions  # noqa: E402
from align.schemas.safe_text import shown  # noqa: E402
from align.stages.server import server_client  # noqa: E402
from align.stages.server.probes import PROBES  # noqa: E402
from align.stages.tracking.progress import NoProgress  # noqa: E402
from support.chat_server import OF_CHAT, OF_TEXT, Reply, chat_server  # noqa: E402
from support.sample_tables import sample_table  # noqa: E402

DOORS = {"sample": "completion", "rubric": "Score", "pairwise": "Verdict"}
LEVELS = ("bytes", "json", "words")
TEXTS = {f"Number {one}?": [f"answer-{one}{two}" for two in "ab"] for one in range(2)}
RETRIES = 1
# Until a request is lost: where bytes come slowly or never, a busy machine may lose others too.
SECONDS = {"bytes": 1.0, "json": 20.0, "words": 20.0}
LATE = "no whole answer in 1 s"
SHORTEST_PART = 8  # characters of the key that nobody may see


def name_of(seed):
    """What is damaged, and what is asked for."""
    return f"{LEVELS[seed % 3]} {[*DOORS][seed // 3 % 3]}"


@dataclass(frozen=True)
class Told:
    """What a right client takes from an answer."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int


def told_in(body, path):
    """What an answer says, read plainly; None if it is not a right one."""
    try:
        record = json.loads(body, object_pairs_hook=_each_once)
        (choice,) = record["choices"]
        counts = [record["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
        text = choice["message"]["content"] if path == OF_CHAT else choice["text"]
        if text is None and path == OF_CHAT:
            text = ""
        text.encode()
        finish = choice["finish_reason"]
        is_right = (
            all(type(count) is int and 0 <= count < 2**31 for count in counts)
            and isinstance(finish, str)
            and finish not in ("abort", "error")
            and _is_stub(record["model"])
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return (
        Told(text, finish if finish in ("stop", "length") else "other", *counts)
        if is_right
        else None
    )


def _each_once(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError(pairs)
    return dict(pairs)


def _is_stub(model):
    """Whether this names the model `stub`, with a folder, a revision or a date."""
    return model.rstrip("/").split("/")[-1].split("@")[0].lower() in ("stub", "stub-2026-01-31")


def verdict_in(told, word):
    """What a judge says, read plainly: its last line, where nothing else looks like one."""
    if told.finish == "length":
        return None
    text = told.text.rstrip()
    before = [text[:at].rstrip() for at, mark in enumerate(text) if mark == ":"]
    if sum(one.casefold().endswith(word.casefold()) for one in before) != 1:
        return None
    label, _, said = text.split("\n")[-1].strip().partition(": ")
    known = ["A", "B", "tie"] if word == "Verdict" else [str(one) for one in range(1, 11)]
    return said if label == word and said in known else None


class Server:
    """A server whose answers to a case are drawn, and which remembers what it said."""

    def __init__(self, seed):
        self.seed, self.draw = seed, random.Random(f"server {seed}")
        self.level, self.door = name_of(seed).split()
        self.spoils = self.draw.choice(("all", "questions", "questions", "first", "first"))
        self.path = OF_TEXT if self.door == "sample" and self.draw.random() < 0.5 else OF_CHAT
        self.answers = defaultdict(list)  # every Wire by what was asked
        self.asked = {}
        self.what = set()

    def says(self, asked):
        """A text that follows from the question, or a drawn one."""
        if asked.last in PROBES or self.level != "words":
            return self._usual(asked)
        draw = self._drawing(asked.content)
        if self.door == "sample":
            text = hostile_answers.completion(draw)
        else:
            text = hostile_answers.verdict(draw, DOORS[self.door])
        return Reply(text, draw.choice(("stop", "stop", "stop", "length", "eos")))

    def _drawing(self, key):
        """The same for the same request, whichever comes first."""
        return random.Random(f"{self.seed} {len(self.answers[key])} {key}")

    def _usual(self, asked):
        if self.door == "sample" or asked.last in PROBES:
            return Reply(f"an answer to {asked.last}")
        return Reply({"rubric": "Good.\nScore: 7", "pairwise": "Good.\nVerdict: A"}[self.door])

    def wire(self, elsewhere, asked, body):
        """The bytes of one answer, which are remembered."""
        key = asked.content if asked else "models"
        self.asked[key] = asked
        found = self._drawn(elsewhere, asked, body, key)
        self.answers[key].append(found)
        if not found.is_plain:
            self.what.add(found.what)
        return found.pieces

    def _drawn(self, elsewhere, asked, body, key):
        draw, times = self._drawing(key), len(self.answers[key])
        is_probe = asked is None or asked.last in PROBES
        is_left = (is_probe and self.spoils != "all") or (times and self.spoils == "first")
        if self.level == "words" or is_left or draw.random() < 0.3:
            return hostile_http.plain(body)
        if self.level == "bytes":
            return hostile_http.wire(draw, body, elsewhere)
        how, body = hostile_answers.record(draw, json.loads(body))
        return replace(hostile_http.plain(body), what=how, is_plain=False)

    def told(self, key):
        """What a right client knows in the end of what it asked."""
        last = self.answers[key][-1]
        return None if last.body is None else told_in(last.body, self.asked[key].path)

    def fault_of_requests(self):
        """Whether something was asked for too often."""
        for key, answers in self.answers.items():
            if len(answers) > RETRIES + 1 and key != "models":
                return f"{len(answers)} requests of one answer"
            is_right = any(one.is_plain for one in answers[:-1])
            if is_right and key != "models" and self.level != "bytes":
                return "an answer that was right is asked for again"
        return ""


class Said:
    """Everything that is said while a case is tried."""

    def __init__(self):
        self.all, self.is_broken = [], ""
        handler = logging.Handler()
        handler.emit = lambda record: self.all.append(record.getMessage())
        logging.getLogger("align").addHandler(handler)
        loud = logging.Handler()
        loud.emit = lambda record: self.breaks(record.getMessage())
        logging.getLogger("asyncio").addHandler(loud)
        warnings.showwarning = lambda message, *_: self.breaks(f"warning: {message}")
        threading.excepthook = lambda found: self.breaks(f"in a thread: {found.exc_value!r}")

    def breaks(self, text):
        """Something that nobody caught."""
        self.is_broken = text

    def by(self, call):
        """Makes a call, and keeps what its error says."""
        try:
            return call()
        except AlignError as error:
            self.all.append(str(error))
            raise

    def fault(self):
        """A part of the key, or a character that a terminal obeys."""
        if self.is_broken:
            return f"nobody caught {self.is_broken}"
        parts = {KEY[at : at + SHORTEST_PART] for at in range(len(KEY) - SHORTEST_PART + 1)}
        for text in self.all:
            if any(part in text for part in parts):
                return f"the key is said: {text}"
            if shown(text) != text:
                return f"a control character is said: {text!r}"
        return ""


class Elsewhere(socketserver.BaseRequestHandler):
    """Where a redirect leads: nobody may come."""

    came = 0

    def handle(self):
        """Counts."""
        Elsewhere.came += 1


class Kept:
    """What the cases of a process share."""

    @classmethod
    def prepare(cls, folder):
        """Made once."""
        os.environ.update(ALIGN_HOME=str(folder / "home"), OPENAI_API_KEY=KEY)
        server_client.FIRST_PAUSE = server_client.LONGEST_ASKED_PAUSE = 0.01
        cls.said = Said()
        shutil.rmtree(folder / "samples", ignore_errors=True)
        cls.samples = sample_table(folder / "samples", TEXTS)
        listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Elsewhere)
        cls.elsewhere = f"http://127.0.0.1:{listener.server_address[1]}"
        threading.Thread(target=listener.serve_forever, daemon=True).start()


def config_of(url, server, folder):
    """The settings of a command that asks a server."""
    prompts = folder / "p.jsonl"
    if server.path == OF_TEXT:
        rows = [{"prompt": text} for text in TEXTS]
    else:
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in TEXTS]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    named = server.draw.choice(("stub", "stub", ""))
    given = {"url": url, "model": named, "revision": "1", "concurrency": 4}
    return Config(
        data=DataOptions(files=[str(prompts)]),
        sample=SampleOptions(output=str(folder / "out"), n=2),
        judge=JudgeOptions(output=str(folder / "out"), by=server.door),
        server=ServerOptions(**given, timeout=SECONDS[server.level], retries=RETRIES),
        tracking=TrackingOptions(mlflow=False),
    )


def case(seed, folder):
    """Samples or judges by a server."""
    shutil.rmtree(folder / "case", ignore_errors=True)
    (folder / "case").mkdir()
    server = Server(seed)
    Kept.said.all, Kept.said.is_broken = [], ""
    came = Elsewhere.came
    with chat_server(server.says, wire=partial(server.wire, Kept.elsewhere)) as stub:
        config = config_of(stub.url, server, folder / "case")
        named = (stub.url, *("server.",) * (server.level == "json"))
        end = tried(
            partial(Kept.said.by, partial(asked, config, server.door)),
            named,
            partial(judged, server, folder / "case" / "out"),
        )
    fault = Kept.said.fault() or server.fault_of_requests()
    if Elsewhere.came > came:
        fault = "a redirect was followed"
    if end.outcome == "refused" and not server.what and LATE not in end.detail:
        fault = "refused, where every answer is right"
    if fault and end.outcome not in ("hang", "crash", "traceback", "memory"):
        end = replace(end, outcome="wrong", detail=f"{fault[:400]!r} of {end.detail[:200]}")
    return replace(end, detail=f"{sorted(server.what)}: {end.detail}"[:900])


def asked(config, door):
    """What a command makes."""
    if door == "sample":
        return sample(config, progress=NoProgress()).manifest
    return judge(config, Kept.samples, progress=NoProgress()).manifest


def judged(server, output, manifest):
    """Whether the table holds what was answered."""
    told = {
        key: server.told(key)
        for key, asked in server.asked.items()
        if asked and asked.last not in PROBES
    }
    rows = pq.read_table(output / f"{manifest.kind}.parquet").to_pylist()
    if server.door == "sample":
        return _samples_end(rows, told, server)
    return _scores_end(rows, told, server)


def _samples_end(rows, told, server):
    """The samples of each prompt are those answered, in any order."""
    found = defaultdict(list)
    for row in rows:
        text = row["completion"]
        if server.path == OF_CHAT:
            (text,) = [one["content"] for one in text]
        kept = Told(text, row["finish"], row["prompt_tokens"], row["completion_tokens"])
        found[json.dumps(row["prompt"])].append(kept)
    for prompt in TEXTS:
        given = [one for key, one in told.items() if server.asked[key].last == prompt]
        (kept,) = [kept for name, kept in found.items() if prompt in name] or [[]]
        if kept and sorted(kept, key=repr) != sorted(given, key=repr):
            return End("wrong", f"{kept!r:.300} and not {given!r:.300}")
    return End("same" if len(rows) == 2 * len(TEXTS) else "quarantined")


def _scores_end(rows, told, server):
    """Each score is that of the last line of its answer, or follows from two of them."""
    said = {}
    for key, one in told.items():
        shown_texts = sorted(
            (text for own in TEXTS.values() for text in own if text in server.asked[key].last),
            key=server.asked[key].last.index,
        )
        said[tuple(shown_texts)] = one and verdict_in(one, DOORS[server.door])
    for row in rows:
        wanted = _score_of(row["completion"], said, server.door)
        if row["score"] != wanted:
            return End("wrong", f"{row['completion']} has {row['score']} and not {wanted}: {told}")
    return End("same" if all(said.values()) else "quarantined")


def _score_of(text, said, door):
    if door == "rubric":
        found = said.get((text,))
        return None if found is None else float(found)
    (other,) = [one for own in TEXTS.values() if text in own for one in own if one != text]
    both = said.get((text, other)), said.get((other, text))
    if None in both:
        return None
    return {("A", "B"): 1.0, ("B", "A"): 0.0}.get(both, 0.5)


def without_range():
    """Takes any number for a score."""
    from align.stages.judge import verdicts  # noqa: PLC0415

    verdicts._SCORE = verdicts.re.compile(r"Score: (-?\d+)")
    verdicts._MENTION[verdicts._SCORE] = verdicts.re.compile(r"score\s*:", verdicts.re.IGNORECASE)


CAMPAIGN = Campaign(__file__, name_of, case, Kept.prepare, plants={"range": without_range})

if __name__ == "__main__":
    sys.exit(runner.main(CAMPAIGN))
