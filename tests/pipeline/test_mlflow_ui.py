"""`align ui` serves the runs that are recorded here to this machine, and shows no password."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import closing

import psutil
import pytest

from align.pipeline.jobs.mlflow_ui import pages_of
from align.schemas.config import TrackingOptions
from support.command import refusal
from support.mlflow_runs import begun
from support.patience import PATIENCE
from support.tracked_training import wait_for

pytestmark = pytest.mark.usefixtures("no_mlflow_settings")


def test_an_address_is_given_where_no_list_of_processes_shows_it():
    uri = "postgresql://me:hunter2@host/db"
    pages = pages_of(TrackingOptions(uri=uri), port=5001)
    assert pages.environment["MLFLOW_BACKEND_STORE_URI"] == uri
    assert "hunter2" not in " ".join((*pages.words, pages.shown))
    assert {"127.0.0.1", "5001"} <= {*pages.words}
    assert pages.environment["PYTHONSAFEPATH"] == "1"  # no module comes from the folder here


def test_a_store_that_is_not_there_is_not_made_and_a_server_shows_itself(here, monkeypatch):
    assert f"{here / 'mlflow.db'} is not there" in refusal(2, "ui")
    assert not [*here.iterdir()]
    said = refusal(2, "ui", "--uri", "https://me:hunter2@example.org")
    assert "is a server" in said
    assert "hunter2" not in said
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://example.org")
    assert "http://example.org is a server" in refusal(2, "ui")


@pytest.mark.long
def test_the_pages_show_a_run_to_this_machine_alone(here):
    home = here / "align-cache"
    (home / "_align").mkdir(parents=True)
    with begun(home, f"sqlite:///{here}/mlflow.db") as run:
        run.log_metrics({"rows": 3.0})
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, "-m", "align", "ui", "--port", str(port))
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert serving.stdout.readline().startswith(f"http://127.0.0.1:{port} shows sqlite://")
        query = json.dumps({"experiment_ids": ["1"]}).encode()
        wait_for(lambda: answered(port, "experiments/get-by-name?experiment_name=align"), PATIENCE)
        found = json.loads(answered(port, "runs/search", query))
        (metric,) = found["runs"][0]["data"]["metrics"]
        assert (metric["key"], metric["value"]) == ("rows", 3.0)
        process = psutil.Process(serving.pid)
        ours = (process, *process.children(recursive=True))
        heard = {
            one.laddr.ip
            for each in ours
            for one in each.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
        assert heard == {"127.0.0.1"}
    finally:
        os.killpg(serving.pid, signal.SIGTERM)
        serving.communicate(timeout=PATIENCE)


def answered(port, what, query=None):
    """What the server says to a question; nothing as long as it does not listen."""
    url = f"http://127.0.0.1:{port}/api/2.0/mlflow/{what}"
    asked = urllib.request.Request(url, query, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return answer.read()
    except OSError:
        return b""
