"""Secrets of every kind go in, and none comes out: not in a file, a store, or what is said."""

import json
import logging
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from align.cli import SafeFormatter
from align.schemas.safe_text import MASK
from support.command import align
from support.planted import contents_below
from support.trainings import Person

# Each is planted once, and sought in every byte that is left.
CANARIES = {
    "password": "canaryAAAA/withslash",
    "decoded": "canaryBBBB/decoded",
    "token": "canaryCCCCtoken",
    "query": "canaryDDDDquery",
    "query_password": "canaryEEEEquery",
    "fragment": "canaryFFFFfragment",
    "environment_uri": "canaryGGGGenv",
    "environment_password": "canaryHHHHpassword",
    "environment_token": "canaryIIIItoken",
    "hub": "hf_canaryJJJJJJJJJJJJ",
    "run_name": "ghp_canaryKKKKKKKKKKKK",
    "path": "canaryLLLLpath",
    "deepspeed": "canaryMMMMcomet",
    "git": "canaryNNNNgit",
    "option": "canaryOOOOoption",
}
PARTS = [part for canary in CANARIES.values() for part in canary.replace("ghp_", "").split("/")]


@pytest.fixture
def surroundings(tmp_path):
    """A git work tree whose origin has a token, and secrets in the environment."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    origin = f"https://{CANARIES['git']}@github.example/me/work.git"
    subprocess.run(["git", "remote", "add", "origin", origin], cwd=tmp_path, check=True)
    return {
        "MLFLOW_TRACKING_URI": f"http://me:{CANARIES['environment_uri']}@127.0.0.1:9",
        "MLFLOW_TRACKING_PASSWORD": CANARIES["environment_password"],
        "MLFLOW_TRACKING_USERNAME": "me",
        "DATABRICKS_TOKEN": CANARIES["environment_token"],
        "HF_TOKEN": CANARIES["hub"],
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }


def writes_down(person):
    """Gives a person's commands, and keeps what they say in the folder that is searched."""

    def give(*words, code=None):
        done = person.tries(*words)
        number = len(list(person.folder.glob("said-*")))
        (person.folder / f"said-{number}.txt").write_text(done.out + done.err)
        assert "Traceback" not in done.err, done.err
        assert code in {None, done.code}, done

    return give


def found_in(*folders):
    """Every file that holds a part of a canary."""
    hits = []
    for path, held in contents_below(*folders):
        hits += [(path.name, part) for part in PARTS if part.encode() in held]
        hits += [(path.name, part) for part in PARTS if part in path.name]
    return hits


def addresses(port):
    """Each way in which a secret stands in an address; the second is that of a server."""
    quoted = CANARIES["decoded"].replace("/", "%2F")
    return [
        f"http://me:{CANARIES['password']}@127.0.0.1:{port}",
        f"http://me:{quoted}@127.0.0.1:{port}",
        f"https://{CANARIES['token']}@127.0.0.1:{port}",
        f"http://127.0.0.1:{port}?token={CANARIES['query']}",
        f"postgresql://me:{quoted}@127.0.0.1:{port}/ml?password={CANARIES['query_password']}",
        f"http://127.0.0.1:{port}/#{CANARIES['fragment']}",
    ]


def test_no_secret_is_written_said_or_sent(course, world, mlflow_server, surroundings, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    give = writes_down(Person(course.server, folder, surroundings))
    ways = addresses(mlflow_server.uri.rpartition(":")[2])
    engine = {"zero_optimization": {"stage": 0}, "comet": {"api_key": CANARIES["deepspeed"]}}
    (tmp_path / "ds.json").write_text(json.dumps(engine))
    named = ("--set", f"tracking.run_name=run-{CANARIES['run_name']}")
    named += ("--set", f"tracking.uri={ways[1]}")
    made = ("--model", course.model, "--output", "cache", "--kl-pairs", 0)
    give("precompute-ref", world.data.paired, *made, *named, code=0)
    short = ("--method", "dpo", "--batch-size", 8, "--max-steps", 2, "--eval-fraction", 0.2)
    text = ("--set", "train.eval_text=true", "--set", f"train.deepspeed={tmp_path}/ds.json")
    give("train", "--cache", "cache", "--output", "run", *short, *text, *named, code=0)
    for address in ways:
        give("mlflow-sync", "run", "--uri", address)
        said = align("config", "--set", f"tracking.uri={address}")
        (folder / f"said-of-{ways.index(address)}.txt").write_text(said.out + said.err)
    give("report", "run")
    give("train", "--set", f"train.cache=/no?token={CANARIES['path']}")
    give("train", "--set", f"trian.lr=http://x?secret={CANARIES['option']}")
    stored = Path(mlflow_server.folder)
    assert found_in(folder, stored) == []
    assert MASK in (folder / "run" / "config.yaml").read_text()
    with closing(sqlite3.connect(stored / "server.db")) as database:
        names = [name for (name,) in database.execute("SELECT name FROM runs")]
    assert f"run-{MASK}" in names, "the store was told, with the secret left out"


def test_a_line_of_the_log_tells_no_secret_and_steers_no_terminal():
    record = logging.makeLogRecord({"msg": "at https://me:word@host/ \x1b[2J"})
    assert SafeFormatter().format(record) == f"at https://{MASK}@host/ \\u001b[2J"


@pytest.mark.parametrize("command", [[], ["train"]])
def test_a_word_that_is_no_flag_is_said_without_its_secret(command):
    said = align(*command, "--https://me:hunter2secret@host/x")
    assert said.code == 2, said
    assert MASK in said.err
    assert "hunter2secret" not in said.out + said.err
