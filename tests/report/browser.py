"""A headless Chromium for tests, driven over the W3C WebDriver protocol with the standard library.

Needs `chromium` (or Chrome) and its `chromedriver`; Debian: apt-get install chromium-driver.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox: tests may run as root, on pages of their own. The rest keeps it from calling home.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--hide-scrollbars",
)


def missing() -> str:
    """Why no browser can be driven here; empty if one can."""
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser: none of {', '.join(BROWSERS)} is on the PATH"
    return "" if shutil.which("chromedriver") else "no chromedriver on the PATH"


class Browser:
    """One window; use as a context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._driver = subprocess.Popen(
            [shutil.which("chromedriver") or "chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self._url = self._begin()
        except BaseException:
            self._end()
            raise

    def _begin(self) -> str:
        assert self._driver.stdout is not None
        said = iter(self._driver.stdout.readline, "")
        port = next(m[1] for x in said if (m := re.search(r"successfully on port (\d+)", x)))
        self._url = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": next(path for path in map(shutil.which, BROWSERS) if path),
            "args": [*FLAGS, f"--user-data-dir={self._folder.name}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        return f"{self._url}/{made['sessionId']}"

    def _end(self) -> None:
        self._driver.terminate()
        self._driver.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._send("DELETE", "", None)
        finally:
            self._end()

    def _send(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with self._open(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def _post(self, path: str, body: Any) -> Any:
        return self._send("POST", path, body)

    def _devtools(self, command: str, **params: Any) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": params})

    def show(self, page: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open a file at a window size, in light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.open(page.resolve().as_uri(), width, height)

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """Open an address at a window size."""
        self.resize(width, height)
        self._post("/url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)

    def js(self, body: str, *args: Any) -> Any:
        """What a function of this body returns, after the page's next two frames."""
        self._post(
            "/execute/async",
            {
                "script": "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))",
                "args": [],
            },
        )
        return self._post("/execute/sync", {"script": body, "args": list(args)})

    def complaints(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def pointer(self, *steps: dict[str, Any]) -> None:
        """Mouse steps: {"type": "pointerMove", "x": 1, "y": 2}, "pointerDown", "pointerUp"."""
        filled = [{"button": 0, "duration": 20, **step} for step in steps]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        self._post("/actions", {"actions": [mouse | {"actions": filled}]})

    def hover(self, x: float, y: float) -> None:
        self.pointer({"type": "pointerMove", "x": round(x), "y": round(y)})

    def wheel(self, x: float, y: float, by: int) -> None:
        step = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": by}
        actions = {"type": "wheel", "id": "wheel", "actions": [step | {"duration": 0}]}
        self._post("/actions", {"actions": [actions]})

    def press(self, key: str) -> None:
        """A key, by its character or WebDriver code point."""
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})
