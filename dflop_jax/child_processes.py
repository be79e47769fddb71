"""Child processes that answer: lines over their stdin and stdout, and their last words.

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
_MAX_STDERR_CHARS = 300  # characters that are told of what it wrote last


def child_source(module: str, paths: Sequence[str]) -> str:
    """What a child runs: a module's `main`, imported from `paths` before all else."""
    return f"import sys; sys.path[:0] = {[*paths]!r}; from {module} import main; main()"


def child_command(module: str, paths: Sequence[str] = ()) -> list[str]:
    """What starts a process that runs a module's `main`; modules of `paths` come before ours."""
    return [sys.executable, "-c", child_source(module, [*paths, _ROOT])]


class Child:
    """A process that answers lines with lines.

    Args:
      module: whose `main` it runs; `paths`: see `command`.
      environment: its variables; None: this process's.
      keeps_words: what it writes to stderr is kept for `last_words`, in place of this process's.
    """

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
            env=None if environment is None else dict(environment),
        )

    @property
    def pid(self) -> int | None:
        """Process id while it lives."""
        return self._process.pid if self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Its exit code: None while it lives; below 0: the signal that ended it."""
        return self._process.poll()

    def send(self, line: bytes) -> None:
        """Write a line to it, if it lives."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its silence is the answer
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def receive(self) -> bytes:
        """Its next line; b"" where it died before it had written all of it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return line if line.endswith(b"\n") else b""

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> int:
        """Close its pipes and wait until it has ended; its exit code."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        code = self._process.wait()
        if self._stderr_file is not None:
            with self._stderr_file as stderr_file:
                stderr_file.seek(0)
                self._stderr_text, self._stderr_file = (
                    stderr_file.read().decode(errors="replace"),
                    None,
                )
        return code

    def describe_exit(self) -> str:
        """End it; how it ended and the last line that it wrote to stderr."""
        code = self.close()
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = [text for text in self._stderr_text.splitlines() if text.strip()]
        return f"({status}): {lines[-1].strip()[:_MAX_STDERR_CHARS] if lines else 'in silence'}"


def open_child_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Begin as a child; returns where its requests come from, and where its answers go."""
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes elsewhere than the answers
    return sys.stdin.buffer, stdout


def ignore_signals() -> None:
    """Let signals to all processes of a job (a cluster's, a terminal's) end the parent only; the
    child ends when that does."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
