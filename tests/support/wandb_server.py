"""A small server of W&B on the loopback: what wandb's own service asks for, and what it keeps."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

from support.patience import PATIENCE, wait_until
from support.tracker_contract import StoredRun

HISTORY = "wandb-history.jsonl"
OWN = {"step", "_step", "_runtime", "_timestamp", "_wandb"}  # columns of wandb, and the step
STORAGE = "/storage/"


class WandbServer:
    """Runs by their ids, each with its rows by the place in its history."""

    name = "wandb"
    unkept = ()
    bits = 64
    description = "notes"

    def __init__(self, url, address):
        self.url, self.address = url, address
        self.rows, self.exit_codes, self.runs, self.files = {}, {}, {}, {}
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()

    def history(self, run_id):
        """The rows of a run in their order."""
        rows = self.rows.get(run_id, {})
        return [json.loads(rows[place]) for place in sorted(rows)]

    def numbers(self, run_id):
        """Name, step, value and seconds of every number, as often as it is there."""
        return sorted(
            (name, row["step"], row[name], row["_timestamp"])
            for row in self.history(run_id)
            for name in row.keys() - OWN
        )

    def stored(self, run_id):
        """An ended run as the store has it."""
        wait_until(lambda: run_id in self.exit_codes)
        config = {k: one["value"] for k, one in json.loads(self.runs[run_id]["config"]).items()}
        own = config.pop("align")
        return StoredRun(
            own["status"],
            {name: str(value) for name, value in config.items() if name != "_wandb"},
            own["tags"] | {"notes": self.runs[run_id].get("notes")},
            sorted(own["data"]),
            [number[:3] for number in self.numbers(run_id)],
            {
                name.removeprefix("align/"): text
                for name, text in self.files.get(run_id, {}).items()
                if name.startswith("align/")
            },
            sorted(own["models"]),
        )

    def run_count(self):
        """How many runs it has."""
        return len(self.runs)

    def break_down(self):
        """Answers 500 from now on."""
        self.status = 500

    def mend(self):
        """Is as it was."""
        self.status = 200
        self.may_answer.set()

    def hang(self):
        """Takes requests and answers none."""
        self.may_answer.clear()

    def answer(self, path, content):
        """What the server says to a request."""
        if path.startswith(STORAGE):
            run_id, name = path.removeprefix(STORAGE).split("/", 1)
            self.files.setdefault(run_id, {})[unquote(name)] = content.decode()
            return {}
        asked = json.loads(content) if content.startswith(b"{") else {}
        if path.endswith("/file_stream"):
            run_id = path.split("/")[-2]
            chunk = asked.get("files", {}).get(HISTORY, {"offset": 0, "content": []})
            places = enumerate(chunk["content"], chunk["offset"])
            self.rows.setdefault(run_id, {}).update(places)
            if asked.get("complete"):
                self.exit_codes[run_id] = asked["exitcode"]
            return {}
        if path.endswith("graphql"):
            return {"data": self._queried(asked.get("query", ""), asked.get("variables", {}))}
        return {}

    def _queried(self, query, given):
        if "mutation UpsertBucket" in query:
            known = {name: value for name, value in given.items() if value is not None}
            self.runs.setdefault(given["name"], {}).update(known)
            entity = {"id": "me", "name": "me"}
            project = {"id": "p", "name": given["project"], "entity": entity}
            own = dict.fromkeys(("id", "name", "displayName"), given["name"])
            return {"upsertBucket": {"bucket": {**own, "project": project}, "inserted": True}}
        if "query RunResumeStatus" in query:
            return {"model": {"id": "p", "name": "p", "bucket": self._bucket(given["name"])}}
        if "query Viewer" in query:
            own = {"id": "me", "entity": "me", "username": "me", "flags": "{}"}
            return {"viewer": {**own, "teams": {"edges": []}}}
        if "mutation CreateRunFiles" in query:
            place = f"{self.url}{STORAGE}{given['run']}/"
            files = [{"name": one, "uploadUrl": place + quote(one)} for one in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def _bucket(self, run_id):
        if run_id not in self.runs:
            return None
        rows = self.rows.get(run_id, {})
        lines = [rows[place] for place in sorted(rows)]
        known = self.runs[run_id]
        return {
            "id": run_id,
            "name": run_id,
            "displayName": known.get("displayName", run_id),
            "tags": [],
            "notes": known.get("notes", ""),
            "summaryMetrics": "{}",
            "config": known.get("config", "{}"),
            "wandbConfig": json.dumps({"t": 1}),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyLineCount": len(lines),
            "eventsTail": "[]",
            "historyTail": json.dumps(lines[-1:]),
        }


@contextmanager
def serving(address=""):
    """The server, as long as the block runs; the address is that of wandb's files."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server.may_answer.wait(PATIENCE)
            said = b"out of order"
            if server.status == 200:
                said = json.dumps(server.answer(self.path, content)).encode()
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_PUT = do_GET = do_POST  # noqa: N815 - named by http.server

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server = WandbServer(f"http://127.0.0.1:{http.server_address[1]}", address)
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.mend()
        http.shutdown()
        thread.join()
