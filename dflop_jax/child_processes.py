"""Child processes that answer requests, line by line, over stdin and stdout.

A child runs a module's `main` under `python -c`, so scripts need no `__main__` guard and nothing is
pickled. It ends when its stdin closes, so it cannot outlive its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_ROOT = str(Path(__file__).resolve().parents[1])
_MAX_STDERR_CHARS = 300  # of a child's last line of stderr in a message


def child_source(module: str, paths: Sequence[str]) -> str:
    """Return the source for `python -c` that runs a module's `main`, imported from `paths`."""
    return f"import sys; sys.path[:0] = {[*paths]!r}; from {module} import main; main()"


def child_command(module: str, paths: Sequence[str] = ()) -> list[str]:
    """Return the command line of a child; `paths` come before this package's in sys.path."""
    return [sys.executable, "-c", child_source(module, [*paths, _ROOT])]


class Child:
    """A child process that answers each line with a line. With `captures_stderr`, its stderr goes
    to `describe_exit` instead of this process's stderr."""

    def __init__(
        self,
        module: str,
        *,
        paths: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        captures_stderr: bool = False,
    ):
        self._stderr_file = tempfile.TemporaryFile() if captures_stderr else None  # noqa: SIM115
        self._stderr_text = ""
        self._process = subprocess.Popen(
            child_command(module, paths),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr_file,
            env=environment,
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` then returns b""
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def receive(self) -> bytes:
        """Return the child's next line; b"" if the child ended before the line was complete."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return line if line.endswith(b"\n") else b""

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> int:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        code = self._process.wait()
        if self._stderr_file is not None:
            with self._stderr_file as stderr_file:
                stderr_file.seek(0)
                self._stderr_text = stderr_file.read().decode(errors="replace")
            self._stderr_file = None
        return code

    def describe_exit(self) -> str:
        """End the child, and return its exit code or signal and its last line of stderr."""
        code = self.close()
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = [text for text in self._stderr_text.splitlines() if text.strip()]
        return f"({status}): {lines[-1].strip()[:_MAX_STDERR_CHARS] if lines else 'in silence'}"


def open_child_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Return, in a child, the stream of requests and the stream of answers."""
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stderr, not among the answers
    return sys.stdin.buffer, stdout


def ignore_signals() -> None:
    """Ignore signals that a cluster or terminal sends to all processes of a job. They end the
    parent, and then the child."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
