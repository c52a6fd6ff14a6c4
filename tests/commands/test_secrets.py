"""Secrets of every kind go in, and none comes out: not in a file, a store, or what is said."""

import json
import logging
import re
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from align.cli import SafeFormatter
from align.schemas.safe_text import MASK
from align.stages.storage.remote import Remote
from support.command import align
from support.object_server import Faults, environment, faulty_proxy
from support.trainings import Person

# Each is planted once, and its marks are sought in every byte that is left.
CANARIES = {
    "password": "canaryAAAA/canaryZZZZ",
    "decoded": "canaryBBBB/canaryYYYY",
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
OF_STORES = {
    "access key": "AKIACANARYAAAAAAAAAA",
    "secret key": "canaryBBBB/slash+plusBBBBBBBBBBBBBBBBBBB",
    "session token": "canaryCCCCsession//token==",
    "access key of a profile": "AKIACANARYDDDDDDDDDD",
    "secret key of a profile": "canaryEEEE/ofTheProfile+EEEEEEEEEEEEEEEE",
    "session token of a profile": "canaryFFFFprofile/session",
    "password of the endpoint": "canaryGGGGendpoint",
    "password of a location": "canaryHHHHlocation",
    "signature of a signed address": "canaryIIIIsignature",
    "credential of a signed address": "canaryJJJJcredential",
    "shared access signature": "canaryKKKKsas",
    "storage account's key": "canaryLLLLaccountkeyLLLL==",
    "service account's key": "canaryMMMMserviceaccount",
    "connection string": "AccountName=a;AccountKey=canaryNNNN",
    "token in a file of settings": "canaryOOOOyaml",
}


class Careless(Person):
    """Keeps what commands say in the folder that is searched."""

    def tries(self, *words, **more):
        answer = Person(self.server, self.folder, {**self.environment, **more}).tries(*words)
        number = len(list(self.folder.glob("said-*")))
        (self.folder / f"said-{number}.txt").write_text(answer.out + answer.err)
        assert "Traceback" not in answer.err, answer.err
        return answer


def found_in(canaries, *folders):
    """Every file with a mark of a canary in its name or bytes; a database counts as text too."""
    marks = {name: re.findall("(?i)canary....", one) for name, one in canaries.items()}
    assert all(marks.values())
    hits = []
    for path in (one for folder in folders for one in folder.rglob("*") if one.is_file()):
        held = path.name.encode() + b"\n" + path.read_bytes()
        if path.read_bytes().startswith(b"SQLite format 3"):
            with closing(sqlite3.connect(path)) as database:
                held += "\n".join(database.iterdump()).encode()
        hits += [
            (path.name, name) for name, own in marks.items() if any(m.encode() in held for m in own)
        ]
    return hits


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
    person = Careless(course.server, folder, surroundings)
    ways = addresses(mlflow_server.uri.rpartition(":")[2])
    engine = {"zero_optimization": {"stage": 0}, "comet": {"api_key": CANARIES["deepspeed"]}}
    (tmp_path / "ds.json").write_text(json.dumps(engine))
    named = ("--set", f"tracking.run_name=run-{CANARIES['run_name']}")
    named += ("--set", f"tracking.uri={ways[1]}")
    made = ("--model", course.model, "--output", "cache", "--kl-pairs", 0)
    person.gives("precompute-ref", world.data.paired, *made, *named)
    short = ("--method", "dpo", "--batch-size", 8, "--max-steps", 2, "--eval-fraction", 0.2)
    text = ("--set", "train.eval_text=true", "--set", f"train.deepspeed={tmp_path}/ds.json")
    person.gives("train", "--cache", "cache", "--output", "run", *short, *text, *named)
    for address in ways:
        person.tries("mlflow-sync", "run", "--uri", address)
        said = align("config", "--set", f"tracking.uri={address}")
        (folder / f"said-of-{ways.index(address)}.txt").write_text(said.out + said.err)
    person.tries("report", "run")
    person.tries("train", "--set", f"train.cache=/no?token={CANARIES['path']}")
    person.tries("train", "--set", f"trian.lr=http://x?secret={CANARIES['option']}")
    stored = Path(mlflow_server.folder)
    assert found_in(CANARIES, folder, stored) == []
    assert MASK in (folder / "run" / "config.yaml").read_text()
    with closing(sqlite3.connect(stored / "server.db")) as database:
        names = [name for (name,) in database.execute("SELECT name FROM runs")]
    assert f"run-{MASK}" in names, "the store was told, with the secret left out"


@pytest.fixture
def refusing(object_server):
    """A proxy that refuses some requests, and repeats in its answer how they were signed."""
    faults = Faults(lambda *_: True)
    with faulty_proxy(object_server, faults) as url:
        yield url, faults


def test_no_credential_of_a_store_is_written_said_or_stored(
    server, bucket, object_server, refusing, world, tmp_path
):
    home, folder = tmp_path / "user", tmp_path / "here"
    (home / ".aws").mkdir(parents=True)
    folder.mkdir()
    (home / ".aws" / "credentials").write_text(
        f"[work]\naws_access_key_id = {OF_STORES['access key of a profile']}\n"
        f"aws_secret_access_key = {OF_STORES['secret key of a profile']}\n"
        f"aws_session_token = {OF_STORES['session token of a profile']}\n"
    )
    keys = {
        "AWS_ACCESS_KEY_ID": OF_STORES["access key"],
        "AWS_SECRET_ACCESS_KEY": OF_STORES["secret key"],
        "AWS_SESSION_TOKEN": OF_STORES["session token"],
    }
    profile = {"AWS_PROFILE": "work", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    user = environment(object_server, HOME=str(home))
    by_profile = Careless(server, folder, user | profile)
    person = replace(by_profile, environment=user | keys)
    tracked = ("--set", "tracking.uri=sqlite:///store.db")
    made = ("precompute-ref", world.data.paired, "--model", world.model)
    person.gives(*made, "--output", f"{bucket}/cache", *tracked)
    short = ("--method", "kto", "--batch-size", 16, "--max-steps", 1, *tracked)
    person.gives("train", "--cache", f"{bucket}/cache", "--output", "run", *short)
    by_profile.gives("inspect", f"{bucket}/cache")
    url, faults = refusing
    named = url.replace("://", f"://me:{OF_STORES['password of the endpoint']}@")
    told = {"403": url, "400": url, "404": url, "401": named}
    for one, fault in (*((person, fault) for fault in told), (by_profile, "403")):
        faults.waiting[:] = [fault] * 4
        assert one.tries("verify", f"{bucket}/cache", AWS_ENDPOINT_URL=told[fault]).code != 0
    faults.waiting.clear()
    refused_here(person, bucket)
    remote = Remote(bucket)
    for name in remote.list():
        (folder / name.replace("/", "-")).write_bytes(remote.get(name))
    assert found_in(OF_STORES, folder) == []
    (folder / "said-planted.txt").write_text(OF_STORES["secret key"])
    assert found_in(OF_STORES, folder) == [("said-planted.txt", "secret key")], "it would be found"


def refused_here(person, bucket):
    """Failures whose messages come from parsers and libraries."""
    signed = (
        f"?X-Amz-Credential={OF_STORES['credential of a signed address']}"
        f"&X-Amz-Signature={OF_STORES['signature of a signed address']}"
    )
    azure = {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": OF_STORES["storage account's key"],
        "AZURE_STORAGE_CONNECTION_STRING": OF_STORES["connection string"],
        "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={OF_STORES['shared access signature']}",
    }
    google = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"key": OF_STORES["service account's key"]})}
    shared = f"https://account.blob.core.windows.net/c?sig={OF_STORES['shared access signature']}"
    settings = person.folder / "align.yaml"
    settings.write_text(
        f"train:\n  cache: s3://bucket/x?token={OF_STORES['token in a file of settings']}\n"
    )
    for words, more in [
        (("inspect", f"s3://me:{OF_STORES['password of a location']}@bucket/cache"), {}),
        (("verify", f"{bucket}/cache{signed}"), {}),
        (("precompute-ref", shared, "--model", "none"), {}),
        (("precompute-ref", f"s3://bucket/data.jsonl{signed}", "--model", "none"), {}),
        (("train", "--method", "kto"), {}),
        (("inspect", "az://container/cache"), azure),
        (("inspect", "gs://bucket/cache"), google),
    ]:
        assert person.tries(*words, **more).code != 0
    person.tries("config", **azure, **google)
    settings.unlink()


def test_a_line_of_the_log_tells_no_secret_and_steers_no_terminal():
    record = logging.makeLogRecord({"msg": "at https://me:word@host/ \x1b[2J"})
    assert SafeFormatter().format(record) == f"at https://{MASK}@host/ \\u001b[2J"


@pytest.mark.parametrize("command", [[], ["train"]])
def test_a_word_that_is_no_flag_is_said_without_its_secret(command):
    said = align(*command, "--https://me:hunter2secret@host/x")
    assert said.code == 2, said
    assert MASK in said.err
    assert "hunter2secret" not in said.out + said.err
