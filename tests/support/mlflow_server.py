"""A real MLflow server over SQLite on the loopback, in its own process, that can misbehave."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager


@contextmanager
def serving(folder):
    """A server whose store and artifacts lie in a folder."""
    settings = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/server.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": f"{folder}/artifacts",
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | settings,
        text=True,
    )
    try:
        yield Server(process, folder)
    finally:
        process.kill()
        process.communicate()


class Server:
    """The server as its user sees it."""

    def __init__(self, process, folder):
        self._process = process
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self._ask('start')}"

    def start(self):
        """Listens, on the port it had before."""
        self._ask("start")

    def stop(self):
        """Refuses connections from now on."""
        self._ask("stop")

    def slow_down(self, seconds):
        """Waits so long before each answer."""
        self._ask(f"delay {seconds}")

    def break_down(self):
        """Answers 500 from now on."""
        self._ask("broken 1")

    def mend(self):
        """Answers at once and rightly."""
        self._ask("broken 0")
        self._ask("delay 0")

    def _ask(self, request):
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


class Application:
    """MLflow's own, behind a door that may be slow or locked."""

    def __init__(self, app):
        self._app, self._server, self.port = app, None, 0
        self.delay = self.broken = 0.0

    def __call__(self, environ, start_response):
        time.sleep(self.delay)
        if self.broken:
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"out of order"]
        return self._app(environ, start_response)

    def obey(self, request):
        """Does one thing."""
        from werkzeug.serving import make_server  # noqa: PLC0415 - the user needs none of it

        verb, _, value = request.partition(" ")
        if verb == "start" and self._server is None:
            self._server = make_server("127.0.0.1", self.port, self, threaded=True)
            self.port = self._server.port
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        elif verb == "stop" and self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        elif value:
            setattr(self, verb, float(value))


def main():
    """Obeys line by line, and says its port."""
    from mlflow.server import app  # noqa: PLC0415 - takes seconds

    application = Application(app)
    for line in sys.stdin:
        application.obey(line.strip())
        print(application.port, flush=True)


if __name__ == "__main__":
    main()
