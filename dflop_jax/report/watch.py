"""The page of `dflop report`, live: a server for this machine alone that reads run folders as the
page asks for what is new."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from dflop_jax.report.html import Memory, progress, render, tables
from dflop_jax.report.reader import RunReader

HOST = "127.0.0.1"
_LOOK_S = 1.0  # for rows, before an answer goes out with what was read so far


class Watch:
    """What the pages are told of runs, which are read by one request at a time."""

    def __init__(self, runs: Sequence[RunReader], memory: Memory | None = None) -> None:
        self._runs, self._memory = runs, memory
        self._lock = threading.Lock()
        self._changes = 0
        self._begun = time.time_ns()  # tells this server from one before it

    def page(self) -> str:
        """The page as of now."""
        with self._lock:
            return render(self._runs, self._memory, version=self._look())

    def news(self, version: str) -> dict[str, object]:
        """What a page of a version has to show now; charts and tables only where it is another."""
        with self._lock:
            now = self._look()
            told = progress(self._runs, now)
            if now == version:
                return {k: told[k] for k in ("version", "stamp", "status")}
            return {**told, "tables": tables(self._runs)}

    def _look(self) -> str:
        until_s = time.monotonic() + _LOOK_S
        for run in self._runs:
            self._changes += run.look(lambda: time.monotonic() < until_s)
        return f"{self._begun}-{self._changes}"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / and GET /data?version=V of a `PageServer`."""

    server: PageServer

    def do_GET(self) -> None:
        """A request from another site's page, which a name of its own leads here, is refused."""
        address = urlsplit(self.path)
        if self.headers.get("Host", "") not in self.server.names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for 127.0.0.1 or localhost")
        elif address.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.watch.page())
        elif address.path == "/data":
            version = parse_qs(address.query).get("version", [""])[0]
            news = json.dumps(self.server.watch.news(version))
            self._answer(HTTPStatus.OK, "application/json", news)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "no such page")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


class PageServer(ThreadingHTTPServer):
    """Serves a watch's page to this machine; port 0 takes a free one.

    Raises:
      OSError: the port is in use.
    """

    daemon_threads = True

    def __init__(self, watch: Watch, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.watch = watch
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"
