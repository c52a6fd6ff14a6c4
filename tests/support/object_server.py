"""An S3 server on loopback with a bucket of its own, and a proxy before it that loses answers."""

import http.client
import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import boto3
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from align.stages.storage import remote

BUCKET = "bucket"
LATE = 1.5  # seconds, more than a client waits that has AWS_TIMEOUT=1s
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "test/secret+of+the+server",
    "AWS_REGION": "us-east-1",
}


@contextmanager
def s3_server():
    """The address of a server with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    put, one_at_a_time = S3Response._key_response_put, threading.Lock()

    def put_in_one_step(*arguments, **more):
        """As S3 does; moto compares first and puts then, and between them another may put."""
        with one_at_a_time:
            return put(*arguments, **more)

    server.start()
    with mock.patch.object(S3Response, "_key_response_put", put_in_one_step):
        try:
            host, port = server.get_host_and_port()
            url = f"http://{host}:{port}"
            client(url).create_bucket(Bucket=BUCKET)
            yield url
        finally:
            server.stop()
            forget()


def forget():
    """Closes the servers that were open."""
    remote.open_bucket.cache_clear()


def client(url):
    """Another program's way to the same bucket."""
    key, secret, region = KEYS.values()
    known = {"aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": region}
    return boto3.client("s3", endpoint_url=url, **known)


def environment(url, **more):
    """The variables by which a command finds the server."""
    return {**KEYS, "AWS_ENDPOINT_URL": url, **more}


def use(monkeypatch, url, **more):
    """Lets this process find the server."""
    for name, value in environment(url, **more).items():
        monkeypatch.setenv(name, value)
    forget()


@dataclass
class Faults:
    """What happens to the next requests that one is meant for, and what was seen.

    What waits is a status, `drop`, `hang` or `damage`, with `+` if the server does its work.
    """

    applies: object  # of a method, a path and headers
    waiting: list = field(default_factory=list)
    requests: list = field(default_factory=list)  # (method, path)
    injected: list = field(default_factory=list)


@contextmanager
def faulty_proxy(upstream, faults):
    """The address of a proxy that forwards to `upstream`, but for what the faults say."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    server.daemon_threads = True
    server.upstream, server.faults = upstream.removeprefix("http://"), faults
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        forget()


class _Proxy(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"

    def serve(self):
        """Forwards a request, or does to it what a fault says."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self._fault()
        found = self._forward(body) if fault is None or fault.endswith("+") else None
        if fault is None:
            self._answer(*found)
        elif fault.startswith("damage"):
            status, headers, content = found
            self._answer(status, headers, bytes([content[0] ^ 1]) + content[1:])
        elif fault.rstrip("+").isdecimal():
            # As S3 does: what was signed, and by which key, is in the answer.
            signed = f"<Error><Code>Injected</Code><Signed>{self.headers}</Signed></Error>"
            self._answer(int(fault.rstrip("+")), {}, signed.encode())
        else:
            time.sleep(LATE if fault.startswith("hang") else 0)
            self.close_connection = True

    def _fault(self):
        faults = self.server.faults
        faults.requests.append((self.command, self.path))
        if not (faults.waiting and faults.applies(self.command, self.path, self.headers)):
            return None
        faults.injected.append(faults.waiting.pop(0))
        return faults.injected[-1]

    def _forward(self, body):
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), content

    def _answer(self, status, headers, content):
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = serve  # noqa: N815

    def log_message(self, *_):
        """Says nothing."""
