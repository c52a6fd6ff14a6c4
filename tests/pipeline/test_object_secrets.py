"""Credentials of object stores go in by every door, and none comes out by any."""

import json
import re
from dataclasses import replace

import pytest

from align.stages.storage.remote import Remote
from support.object_server import Faults, environment, faulty_proxy
from support.planted import contents_below
from support.trainings import Person

CANARIES = {
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


@pytest.fixture
def refusing(object_server):
    """A proxy that refuses some requests, and repeats in its answer how they were signed."""
    faults = Faults(lambda *_: True)
    with faulty_proxy(object_server, faults) as url:
        yield url, faults


def found_in(folder):
    """Every file that holds a canary: the word of it that no other text has."""
    words = {name: re.search("(?i)canary....", one)[0].encode() for name, one in CANARIES.items()}
    found = contents_below(folder)
    return [(path.name, name) for path, held in found for name in words if words[name] in held]


class Careless(Person):
    """Writes down all that commands say."""

    def tries(self, *words, **more):
        person = Person(self.server, self.folder, {**self.environment, **more})
        answer = person.tries(*words)
        number = len(list(self.folder.glob("said-*")))
        (self.folder / f"said-{number}.txt").write_text(answer.out + answer.err)
        assert "Traceback" not in answer.err, answer.err
        return answer


def test_no_credential_is_written_said_or_stored(
    server, bucket, object_server, refusing, world, tmp_path
):
    home, folder = tmp_path / "user", tmp_path / "here"
    (home / ".aws").mkdir(parents=True)
    folder.mkdir()
    (home / ".aws" / "credentials").write_text(
        f"[work]\naws_access_key_id = {CANARIES['access key of a profile']}\n"
        f"aws_secret_access_key = {CANARIES['secret key of a profile']}\n"
        f"aws_session_token = {CANARIES['session token of a profile']}\n"
    )
    keys = {
        "AWS_ACCESS_KEY_ID": CANARIES["access key"],
        "AWS_SECRET_ACCESS_KEY": CANARIES["secret key"],
        "AWS_SESSION_TOKEN": CANARIES["session token"],
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
    named = url.replace("://", f"://me:{CANARIES['password of the endpoint']}@")
    told = {"403": url, "400": url, "404": url, "401": named}
    for one, fault in (*((person, fault) for fault in told), (by_profile, "403")):
        faults.waiting[:] = [fault] * 4
        assert one.tries("verify", f"{bucket}/cache", AWS_ENDPOINT_URL=told[fault]).code != 0
    faults.waiting.clear()
    _refused_here(person, bucket)
    remote = Remote(bucket)
    for name in remote.list():
        (folder / name.replace("/", "-")).write_bytes(remote.get(name))
    assert found_in(folder) == []
    (folder / "said-planted.txt").write_text(CANARIES["secret key"])
    assert found_in(folder) == [("said-planted.txt", "secret key")], "it would have been found"


def _refused_here(person, bucket):
    """Failures whose messages come from parsers and libraries."""
    signed = (
        f"?X-Amz-Credential={CANARIES['credential of a signed address']}"
        f"&X-Amz-Signature={CANARIES['signature of a signed address']}"
    )
    azure = {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": CANARIES["storage account's key"],
        "AZURE_STORAGE_CONNECTION_STRING": CANARIES["connection string"],
        "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={CANARIES['shared access signature']}",
    }
    google = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"key": CANARIES["service account's key"]})}
    shared = f"https://account.blob.core.windows.net/c?sig={CANARIES['shared access signature']}"
    settings = person.folder / "align.yaml"
    settings.write_text(
        f"train:\n  cache: s3://bucket/x?token={CANARIES['token in a file of settings']}\n"
    )
    for words, more in [
        (("inspect", f"s3://me:{CANARIES['password of a location']}@bucket/cache"), {}),
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
