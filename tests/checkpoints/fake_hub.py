"""A model hub on this machine: the few addresses that huggingface-hub asks for a model."""

import hashlib
import http.server
import json
import re
import threading
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves repositories; used as a context manager.

    Attributes:
      repositories: id to {path in it: bytes}, all on branch "main" and at one commit.
      branches: id to the names of further branches.
      gated: ids of those that nobody has access to.
      served: files that were downloaded, in order.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.branches, self.gated, self.served = {}, {}, set(), []

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repository, folder, prefix="", without=()):
        """Serves the files of a folder."""
        files = {prefix + path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in without}
        self.repositories.setdefault(repository, {}).update(files)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Says nothing."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        # Some versions ask for the repository without a revision where it is the main one.
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self.tree(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file(match[1], match[2], match[3])
        else:
            self.refuse(404, "no such address")

    def known(self, repository, revision):
        """The files, or None after an answer that there are none."""
        files = self.server.repositories.get(repository)
        if files is None:
            self.refuse(404, "RepoNotFound")
        elif revision not in ("main", COMMIT, *self.server.branches.get(repository, ())):
            self.refuse(404, "RevisionNotFound")
        elif repository in self.server.gated:
            self.refuse(403, "GatedRepo")
        else:
            return files
        return None

    def info(self, repository, revision):
        files = self.known(repository, revision)
        if files is not None:
            siblings = [{"rfilename": name} for name in files]
            self.answer(
                json.dumps({"id": repository, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}).encode()
            )

    def tree(self, repository, revision):
        files = self.known(repository, revision)
        if files is not None:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _hash(data)} for name, data in sorted(files.items())
            ]
            self.answer(json.dumps(entries).encode())

    def file(self, repository, revision, name):
        files = self.known(repository, revision)
        if files is None:
            return
        if name not in files:
            self.refuse(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.server.served.append(name)
        headers = {"ETag": f'"{_hash(files[name])}"', "X-Repo-Commit": COMMIT, "Content-Type": "application/octet-stream"}
        self.answer(files[name], headers)

    def refuse(self, status, code):
        self.answer(b"{}", {"X-Error-Code": code}, status)

    def answer(self, body, headers=(), status=200):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _hash(data):
    return hashlib.sha1(data).hexdigest()
