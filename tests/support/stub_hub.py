"""A small Hugging Face Hub on loopback, to which huggingface_hub's own client talks.

Repositories are dicts: name → commits → files. Commits are numbered by what is in them, so a commit
on a branch is a new hash. Large files are stored as in LFS: their address redirects to another
host, which must not get the token.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

OWNER = "you"  # whose token it is
TOKEN = "hf_canaryTokenOfTheStubHub"
LARGE = (".safetensors", ".parquet", ".bin", ".gguf")  # endings of files in LFS
PAGE = 3  # files in an answer of a listing, so that there are several
KINDS = {"models": "", "datasets": "datasets/"}


@dataclass
class Repo:
    """The commits of a repository, oldest first, and its branches and tags."""

    commits: dict = field(default_factory=dict)  # hash: {path: bytes}
    refs: dict = field(default_factory=dict)  # branch or tag: hash
    private: bool = False
    gated: bool = False

    def commit(self, files, branch="main"):
        """Adds a commit of all these files; returns its hash."""
        text = repr((len(self.commits), sorted(files.items())))
        self.refs[branch] = commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        return commit

    def commit_folder(self, folder, **more):
        """Adds a commit of the files below a folder, and of more."""
        found = (path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
        return self.commit(files | more)


class Request(NamedTuple):
    """A request that the server got."""

    method: str
    path: str
    token: str


class Reply(NamedTuple):
    """An answer; its body is bytes or what JSON can say."""

    status: int
    body: object = b""
    headers: dict = MappingProxyType({})


class StubHub:
    """Repositories by name; that of a data set is datasets/owner/name."""

    def __init__(self, port):
        self.url, self.other_host = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self.repos, self.requests = {}, []
        self.large, self.messages = {}, {}  # what was uploaded: by digest, by commit
        self.status = 0  # of every answer, if it is down

    def repo(self, name, **how):
        """A repository, made when it is first named."""
        return self.repos.setdefault(name, Repo(**how))

    def environment(self, home, token="", **more):
        """The variables by which a command finds this server, with a cache of its own."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": token}
        return {**own, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **more}

    def fetched(self):
        """The paths of the files whose content was requested, in their repositories."""
        return {self._path(request.path) for request in self.requests} - {None}

    def _path(self, path):
        found = re.fullmatch(r"/.+/resolve/[^/]+/(.+)", path)
        return unquote(found[1]) if found else None

    # Each answer is that of a route, whose groups are its arguments.

    def answer(self, request, body, headers):
        """The reply to a request."""
        self.requests.append(request)
        if self.status:
            return Reply(self.status)
        place = urlsplit(request.path)
        for methods, pattern, route in ROUTES:
            if request.method in methods and (found := re.fullmatch(pattern, place.path)):
                named = {name: unquote(text or "") for name, text in found.groupdict().items()}
                query = {name: values[-1] for name, values in parse_qs(place.query).items()}
                return route(self, request, query, body, headers, **named)
        return error(404, "", f"no route {request.method} {request.path}")

    def info(self, request, *_, kind, name, revision):
        """The commit of a revision, and its files."""
        repo, commit = self._found(request, kind, name, revision)
        if repo is None:
            return commit
        files = [{"rfilename": path} for path in repo.commits[commit]]
        return Reply(200, {"id": name, "sha": commit, "private": repo.private, "siblings": files})

    def tree(self, request, query, *_, kind, name, revision, folder):
        """A page of the files of a commit."""
        repo, commit = self._found(request, kind, name, revision)
        if repo is None:
            return commit
        files = repo.commits[commit]
        paths = [path for path in sorted(files) if path.startswith(f"{folder}/" if folder else "")]
        first = int(query.get("cursor", 0))
        page = [entry(path, files[path]) for path in paths[first : first + PAGE]]
        more = first + PAGE < len(paths)
        address = f"{self.url}{urlsplit(request.path).path}?recursive=true&cursor={first + PAGE}"
        return Reply(200, page, {"Link": f'<{address}>; rel="next"'} if more else {})

    def resolve(self, request, query, body, headers, *, kind, name, revision, path):
        """The content of a file; a large one is elsewhere."""
        repo, commit = self._found(request, KINDS_BY_PREFIX[kind or ""], name, revision)
        if repo is None:
            return commit
        if repo.gated and request.token != TOKEN:
            return error(403 if request.token else 401, "GatedRepo", "Access is restricted")
        if path not in repo.commits[commit]:
            return error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        content = repo.commits[commit][path]
        own = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not path.endswith(LARGE):
            return ranged(content, headers, {**own, "ETag": f'"{blob_id(content)}"'})
        sha256 = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{sha256}"'}
        return Reply(302, b"", {**own, **linked, "Location": f"{self.other_host}/lfs/{sha256}"})

    def large_file(self, request, query, body, headers, *, sha256):
        """The content of a large file, by its digest."""
        commits = (files for repo in self.repos.values() for files in repo.commits.values())
        for content in (content for files in commits for content in files.values()):
            if hashlib.sha256(content).hexdigest() == sha256:
                return ranged(content, headers, {"ETag": f'"{sha256}"'})
        return Reply(404)

    # Uploads, by a token that may write: TOKEN, in the name of OWNER.

    def create(self, request, query, body, headers):
        """Makes a repository with a first commit, as the Hub does."""
        asked = json.loads(body)
        name = f"{asked['organization'] or OWNER}/{asked['name']}"
        if refusal := self._no_write(request, name):
            return refusal
        if name in self.repos:
            return error(409, "", f"You already created this model repo: {name}")
        made = self.repo(name, private=asked.get("visibility") == "private")
        made.commit({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        return Reply(200, {"url": f"{self.url}/{name}", "name": name})

    def branch(self, request, query, body, headers, *, kind, name, branch):
        """Makes a branch that begins where main ends."""
        refs = self.repos[name].refs
        if refusal := self._no_write(request, name):
            return refusal
        if branch in refs:
            return error(409, "", f"Reference already exists: {branch}")
        refs[branch] = refs["main"]
        return Reply(200, {})

    def validate(self, request, query, body, headers):
        """Reads the front matter of a card as the Hub does: names are those of the Hub."""
        front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
        named = [front.get("base_model", "ok/ok"), *front.get("datasets", [])]
        wrong = [one for one in named if not re.fullmatch(r"[\w.-]+/[\w.-]+", one)]
        errors = [{"message": f"{one!r} is not valid. Use an id of the Hub."} for one in wrong]
        return Reply(400 if wrong else 200, {"errors": errors, "warnings": []})

    def preupload(self, request, query, body, headers, *, kind, name, revision):
        """Which files are large, and what the repository has under their names."""
        repo, commit = self._found(request, kind, name, revision)
        if refusal := self._no_write(request, name):
            return refusal
        known, asked = repo.commits[commit], [one["path"] for one in json.loads(body)["files"]]
        return Reply(200, {"files": [self._mode(path, known.get(path)) for path in asked]})

    def _mode(self, path, known):
        is_large, oid = path.endswith(LARGE), None
        if known is not None:
            oid = hashlib.sha256(known).hexdigest() if is_large else blob_id(known)
        mode = "lfs" if is_large else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def batch(self, request, query, body, headers, *, name):
        """Where large files are sent to: those that are not there yet."""
        if refusal := self._no_write(request, name):
            return refusal
        objects = json.loads(body)["objects"]
        for one in objects:
            if one["oid"] not in self.large:
                href = f"{self.other_host}/lfs/{one['oid']}"
                verify = f"{self.url}/{name}.git/info/lfs/verify"
                one["actions"] = {"upload": {"href": href}, "verify": {"href": verify}}
        return Reply(200, {"transfer": "basic", "objects": objects})

    def send(self, request, query, body, headers, *, sha256):
        """Takes a large file."""
        if hashlib.sha256(body).hexdigest() != sha256:
            return Reply(400)
        self.large[sha256] = body
        return Reply(200)

    def verify(self, request, query, body, headers, *, name):
        """Whether a large file has come whole."""
        asked = json.loads(body)
        content = self.large.get(asked["oid"])
        return Reply(200 if content is not None and len(content) == asked["size"] else 404)

    def committed(self, request, query, body, headers, *, kind, name, revision):
        """Makes a commit of the lines of the body: a header, then files and deletions."""
        repo, commit = self._found(request, kind, name, revision)
        if refusal := self._no_write(request, name):
            return refusal
        header, *lines = (json.loads(line) for line in body.splitlines())
        if header["value"].get("parentCommit", commit) != commit:
            return error(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(repo.commits[commit])
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                del files[value["path"]]
        made = repo.commit(files, revision)
        self.messages[made] = header["value"]["summary"]
        address = f"{self.url}/{name}/commit/{made}"
        return Reply(200, {"success": True, "commitOid": made, "commitUrl": address})

    def _no_write(self, request, name):
        """The refusal of a request that may not write to a repository, if it is one."""
        if request.token != TOKEN:
            return error(401, "", "Invalid username or password.")
        if not name.startswith(f"{OWNER}/"):
            return error(403, "", f"You don't have the rights to write to {name}")
        return None

    def _found(self, request, kind, name, revision):
        """The repository and the commit of a revision; or None and the refusal."""
        repo = self.repos.get(KINDS[kind] + name)
        if request.token not in ("", TOKEN):
            return None, error(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.private and not request.token):
            # As the Hub, which does not say whether there is a private one.
            status = 404 if request.token else 401
            return None, error(status, "RepoNotFound", "Repository not found")
        revision = revision or "main"
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return None, error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit


KINDS_BY_PREFIX = {prefix: kind for kind, prefix in KINDS.items()}
_REPO = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
_REV = r"(?P<revision>[^/]+)"
ROUTES = (  # methods, pattern of a path, route
    (("GET",), rf"{_REPO}(?:/revision/{_REV})?", StubHub.info),
    (("GET",), rf"{_REPO}/tree/{_REV}(?:/(?P<folder>.+))?", StubHub.tree),
    (
        ("GET", "HEAD"),
        rf"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/{_REV}/(?P<path>.+)",
        StubHub.resolve,
    ),
    (("GET", "HEAD"), r"/lfs/(?P<sha256>\w+)", StubHub.large_file),
    (("PUT",), r"/lfs/(?P<sha256>\w+)", StubHub.send),
    (("POST",), "/api/repos/create", StubHub.create),
    (("POST",), "/api/validate-yaml", StubHub.validate),
    (("POST",), rf"{_REPO}/branch/(?P<branch>[^/]+)", StubHub.branch),
    (("POST",), rf"{_REPO}/preupload/{_REV}", StubHub.preupload),
    (("POST",), rf"{_REPO}/commit/{_REV}", StubHub.committed),
    (("POST",), r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", StubHub.batch),
    (("POST",), r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/verify", StubHub.verify),
)


def error(status, code, message, headers=None):
    """A refusal as the Hub words it."""
    named = {"X-Error-Code": code} if code else {}
    more = {**named, "X-Error-Message": message, **(headers or {})}
    return Reply(status, {"error": message}, more)


def entry(path, content):
    """A file in a listing."""
    own = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
    if path.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        own["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return own


def blob_id(content):
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def ranged(content, headers, own):
    """The content, or the part of it that was requested."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range") or "")
    if not found:
        return Reply(200, content, own)
    first, last = int(found[1]), int(found[2] or len(content) - 1)
    own["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    return Reply(206, content[first : last + 1], own)


@contextmanager
def serving():
    """The server, as long as the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            reply = hub.answer(Request(self.command, self.path, token), body, self.headers)
            content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body)
            content = content if isinstance(content, bytes) else content.encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve  # noqa: N815

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = StubHub(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
