"""Credentials of object stores go in by every door, and none comes out by any."""

import json

import pytest

from align.stages.storage import objects
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


def found_in(*folders):
    """Every file that holds a canary."""
    hits = []
    for path, held in contents_below(*folders):
        hits += [(path.name, name) for name, part in parts() if part in held]
    return hits


def parts():
    """Of each canary the word that no other text has."""
    for name, canary in CANARIES.items():
        start = canary.lower().index("canary")
        yield name, canary[start : start + 10].encode()


class Careless(Person):
    """Writes down all that commands say."""

    def tries(self, *words, **more):
        answer = Person(self.server, self.folder, {**self.environment, **more}).tries(*words)
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
        "HOME": str(home),
        "AWS_ACCESS_KEY_ID": CANARIES["access key"],
        "AWS_SECRET_ACCESS_KEY": CANARIES["secret key"],
        "AWS_SESSION_TOKEN": CANARIES["session token"],
    }
    person = Careless(server, folder, {**environment(object_server), **keys})
    objects.put(bucket / "data.jsonl", world.data.paired.read_bytes())
    model = ("--model", world.model)
    tracked = ("--set", "tracking.uri=sqlite:///store.db")
    made = person.tries(
        *("precompute-ref", world.data.paired, *model, "--output", f"{bucket}/cache", *tracked)
    )
    assert made.code == 0, made
    short = ("--method", "kto", "--batch-size", 16, "--max-steps", 1, *tracked)
    trained = person.tries("train", "--cache", f"{bucket}/cache", "--output", "run", *short)
    assert trained.code == 0, trained
    profile = {"AWS_PROFILE": "work", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    by_profile = Careless(
        server, folder, {**environment(object_server), "HOME": str(home), **profile}
    )
    assert by_profile.tries("inspect", f"{bucket}/cache").code == 0
    _refused_everywhere(person, by_profile, bucket, refusing)
    for key in objects.below(bucket):
        (folder / key.replace("/", "-")).write_bytes(
            objects.read(objects.ObjectPath(bucket.scheme, bucket.bucket, key))
        )
    assert len(list(parts())) >= 8
    assert found_in(folder) == []
    (folder / "said-planted.txt").write_text(CANARIES["secret key"])
    assert found_in(folder) == [("said-planted.txt", "secret key")], "it would have been found"


def _refused_everywhere(person, by_profile, bucket, refusing):
    """Failures of every kind, whose messages come from stores, parsers and libraries."""
    url, faults = refusing
    user = f"me:{CANARIES['password of the endpoint']}@"
    for one in (person, by_profile):
        for fault, endpoint in [
            *((fault, url) for fault in ("403", "400", "401", "404")),
            ("403", url.replace("://", f"://{user}")),
        ]:
            faults.waiting[:] = [fault] * 4
            assert one.tries("verify", f"{bucket}/cache", AWS_ENDPOINT_URL=endpoint).code != 0
        faults.waiting.clear()
    signed = (
        f"?X-Amz-Credential={CANARIES['credential of a signed address']}"
        f"&X-Amz-Signature={CANARIES['signature of a signed address']}"
    )
    account = CANARIES["storage account's key"]
    azure = {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": account,
        "AZURE_STORAGE_CONNECTION_STRING": CANARIES["connection string"],
        "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={CANARIES['shared access signature']}",
    }
    google = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"key": CANARIES["service account's key"]})}
    named = f"s3://me:{CANARIES['password of a location']}@bucket/cache"
    shared = f"https://account.blob.core.windows.net/c?sig={CANARIES['shared access signature']}"
    settings = person.folder / "align.yaml"
    settings.write_text(
        f"train:\n  cache: s3://bucket/x?token={CANARIES['token in a file of settings']}\n"
    )
    for words, more in [
        (("inspect", named), {}),
        (("verify", f"{bucket}/cache{signed}"), {}),
        (("precompute-ref", shared, "--model", "none"), {}),
        (("precompute-ref", f"s3://bucket/data.jsonl{signed}", "--model", "none"), {}),
        (("train", "--method", "kto"), {}),
        (("inspect", "az://container/cache"), azure),
        (("inspect", "gs://bucket/cache"), google),
    ]:
        assert person.tries(*words, **more).code != 0
    person.tries("config", **azure, **google)
    (person.folder / "align.yaml").unlink()
