"""Rounds whose policy a server samples from: started for each round, asked once, ended always."""

import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from align.schemas.errors import ServerError
from support.command import refusal, success
from support.rounds_play import damage, lines_of, prompts_in, write_settings
from support.stub_policy import JUDGES_KEY, events, pids_in, require_ended, serve_by
from support.trainings import KILLED

FEW = {"count": 1, "prompts_per_round": 6}
CONCURRENCY = 4
KILLS = 20


def served(folder, world, *words, log=None, rounds=FEW, **changes):
    """The settings of rounds whose policy is a stub."""
    serve = serve_by(log or folder / "events", *words)
    server = {"concurrency": CONCURRENCY, "retries": 1}
    return write_settings(
        folder, world, rounds={**rounds, "serve": serve}, server=server, **changes
    )


def counts(log):
    """How often each request was asked, and answered."""
    found = events(log)
    return [Counter(of for what, of in found if what == kind) for kind in ("asked", "answered")]


def test_each_policy_is_served_in_turn_and_nothing_is_asked_again(here, world):
    # Of a LoRA training the server gets the merged model; the reference is the policy before.
    rounds = {"count": 2, "prompts_per_round": 6, "reference": "previous"}
    path = served(here, world, rounds=rounds, lora={"enabled": True})
    success("rounds", path)
    out = here / "out"
    merged = [str(out / f"round-{number:03d}" / "run" / "model-merged") for number in (1, 2)]
    first = str(Path(world.model).resolve())
    # Held out, then the samples of the next round, by each policy but the last.
    models = [of for what, of in events(here / "events") if what == "model"]
    assert models == [first, first, merged[0], merged[0], merged[1]]
    asked, answered = counts(here / "events")
    held_out = len(prompts_in(out / "held-out.parquet"))
    assert asked == answered
    assert {*asked.values()} == {1}
    assert asked.total() == 2 * 6 * 3 + 3 * held_out
    for name in ("round-000", "round-001", "round-002"):
        assert (out / name / "server.log").exists()
    settings = yaml.safe_load((out / "round-002" / "run" / "config.yaml").read_text())
    assert settings["model"]["path"] == merged[0]
    assert not settings["train"]["other_reference"]

    before = damage(out)  # which needs no server
    success("rounds", path)
    assert [(path, path.read_bytes()) for path, _ in before] == before
    assert len(events(here / "events")) == len(asked) * 2 + 5 * 3


# Words of the stub, settings of rounds, and what the error names.
FAILURES = (
    (("--says", "error"), {}, "CUDA out of memory"),
    (("--says", "nothing"), {"serve_timeout": 0.5}, "rounds.serve_timeout"),
    (("--dies-after", "5"), {}, "dies in the middle"),
)


def test_a_failing_server_is_named_and_costs_no_answer(here, world, monkeypatch):
    log = Path("out") / "round-000" / "server.log"
    for words, settings, named in FAILURES:
        path = served(here, world, *words, rounds={**FEW, **settings})
        refusal(ServerError.exit_code, "rounds", path, names=("rounds.serve", log, named))
    _, answered = counts(here / "events")
    # With a command that works the same rounds resume, also where the model has moved.
    shutil.copytree(world.model, here / "moved")
    monkeypatch.setenv("OPENAI_API_KEY", JUDGES_KEY)
    success("rounds", served(here, world, model={"path": str(here / "moved")}))
    assert "key" not in {what for what, _ in events(here / "events")}
    asked, _ = counts(here / "events")
    assert sum(asked[key] > 1 for key in answered) <= CONCURRENCY  # on their way as it died


@pytest.mark.long
def test_killed_at_drawn_points_no_stored_answer_is_asked_again(world, server, tmp_path):
    rounds = {"count": 2, "prompts_per_round": 6}
    log = tmp_path / "events"
    (tmp_path / "whole").mkdir()
    whole = served(tmp_path / "whole", world, log=tmp_path / "other", rounds=rounds)
    server.success("rounds", whole, cwd=tmp_path / "whole")
    path, drawn = served(tmp_path, world, rounds=rounds), random.Random(0)
    for _ in range(KILLS):
        place = f"before:*=kill@{drawn.randrange(3, 50)}"
        assert server.run("rounds", path, faults=(place,), cwd=tmp_path).code == KILLED
    server.success("rounds", path, cwd=tmp_path)
    assert lines_of(tmp_path / "out") == lines_of(tmp_path / "whole" / "out")
    require_ended(pids_in(log))  # each server and its child
    asked, answered = counts(log)
    assert asked.keys() == answered.keys()
    assert len(asked) == counts(tmp_path / "other")[0].total()
    assert answered.total() - len(answered) <= CONCURRENCY * KILLS
    assert asked.total() - len(asked) <= CONCURRENCY * KILLS
    answers = (tmp_path / "out" / "answers" / "samples").glob("*.jsonl")
    lines = [line for file in answers for line in file.read_bytes().splitlines()]
    assert len({*lines}) == len(lines) == len(asked)


@pytest.mark.long
def test_a_real_server_samples_for_a_round(here, world, monkeypatch):
    # It samples only where the model's own settings do, and looks for the hub's cache.
    model = shutil.copytree(world.model, here / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True}))
    monkeypatch.setenv("HF_HOME", str(here))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program = Path(sys.executable).with_name("transformers")
    rounds = {**FEW, "eval_fraction": 0.0, "serve": f"{program} serve {{model}} --port {{port}}"}
    path = write_settings(here, world, rounds=rounds, model={"path": str(model)})
    success("rounds", path)
    assert [line["round"] for line in lines_of(here / "out")] == [0, 1]
    assert (here / "out" / "round-001" / "server.log").stat().st_size
