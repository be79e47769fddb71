"""A hub on this host that knows one model, or one data set of the same name, as far as fetching it
asks."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

NAME, SHA = "owner/small", "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Its files, what becomes of requests, and which came.

    Attributes:
      status: of every answer about what there is.
      file_status: of answers that send a file, which a gated repository refuses alone.
      asked: how often each path was got.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.status = self.file_status = 200
        self.asked: Counter[str] = Counter()
        self.url = ""

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """The body and headers for a path, None for what there is not."""
        path = path.replace("/api/datasets/", "/api/models/").removeprefix("/datasets")
        if path == f"/api/models/{NAME}/revision/main":
            siblings = [{"rfilename": f} for f in self.files]
            return json.dumps({"id": NAME, "sha": SHA, "siblings": siblings}).encode(), {}
        if path == f"/api/models/{NAME}/tree/{SHA}":
            tree = [
                {"type": "file", "path": f, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for f, b in self.files.items()
            ]
            return json.dumps(tree).encode(), {}
        name = path.removeprefix(f"/{NAME}/resolve/{SHA}/")
        if name in self.files:
            body = self.files[name]
            return body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": SHA}
        return None


@contextmanager
def hub_of(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A running hub with these files."""
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.reply(with_body=False)

        def do_GET(self) -> None:
            hub.asked[urlsplit(self.path).path.rpartition("/")[2]] += 1
            self.reply(with_body=True)

        def reply(self, *, with_body: bool) -> None:
            found = hub.answer(urlsplit(self.path).path)
            status = hub.file_status if "/resolve/" in self.path else hub.status
            status = status if found else 404
            body, headers = found if found and status == 200 else (b'{"error": "no"}', {})
            if not found:
                known = re.match(rf"/api/(models|datasets)/{NAME}/", self.path)
                headers = {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
