"""A small server of W&B on the loopback: what wandb's own service asks for, and rows kept."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HISTORY = "wandb-history.jsonl"


class WandbServer:
    """Runs by their ids, each with its rows by the place in its history."""

    def __init__(self):
        self.rows, self.exit_codes = {}, {}
        self.url = ""

    def history(self, run_id):
        """The rows of a run in their order."""
        rows = self.rows[run_id]
        return [json.loads(rows[place]) for place in sorted(rows)]

    def answer(self, path, asked):
        """What the server says to a request."""
        if path.endswith("/file_stream"):
            run_id = path.split("/")[-2]
            chunk = asked.get("files", {}).get(HISTORY, {"offset": 0, "content": []})
            places = enumerate(chunk["content"], chunk["offset"])
            self.rows.setdefault(run_id, {}).update(places)
            if asked.get("complete"):
                self.exit_codes[run_id] = asked["exitcode"]
            return {}
        query, given = asked.get("query", ""), asked.get("variables", {})
        if "mutation UpsertBucket" in query:
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
            files = [{"name": one, "uploadUrl": f"{self.url}/{one}"} for one in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def _bucket(self, run_id):
        if run_id not in self.rows:
            return None
        lines = [self.rows[run_id][place] for place in sorted(self.rows[run_id])]
        return {
            **{"id": run_id, "name": run_id, "displayName": run_id, "tags": [], "notes": ""},
            **{
                "summaryMetrics": "{}",
                "config": "{}",
                "wandbConfig": json.dumps({"t": 1}),
                "eventsTail": "[]",
            },
            **{"logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(lines)},
            "historyTail": json.dumps(lines[-1:]),
        }


@contextmanager
def serving():
    """The server, as long as the block runs."""
    server = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = json.loads(content) if content.startswith(b"{") else {}
            told = server.answer(self.path, asked)
            said = json.dumps({"data": told} if self.path.endswith("graphql") else told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_PUT = do_GET = do_POST  # noqa: N815 - named by http.server

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield server
        http.shutdown()
        thread.join()
