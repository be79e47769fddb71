"""Starts this test suite's multi-process jobs: N interpreters joined by jax.distributed on gloo."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflop_jax.distributed.processes import LOOPBACK, free_port

ROOT = Path(__file__).resolve().parents[1]
RESULT = "result: "  # begins the line of a child's result
CACHE = Path(tempfile.gettempdir()) / "dflop_jax_tests"  # of compiled programs, for all tests


def runs(pid: int) -> bool:
    """Whether a process runs. One that has ended but was not waited for does not: the first process
    of some containers waits for nobody."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # ended just now, unless nothing says


class ProcessPool:
    """`n` interpreters joined by jax.distributed on gloo, with `devices` CPU devices each, that
    call functions until the pool is closed."""

    def __init__(self, n: int, devices: int):
        port = free_port()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue()  # (process, what it printed)
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.processes", *map(str, (n, i, port, devices))],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(n)
        ]
        self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(n)]
        for reader in self._readers:
            reader.start()

    def _read(self, i: int) -> None:
        for line in self._children[i].stdout or ():
            self._lines.put((i, line))
        self._lines.put((i, ""))  # it has ended

    def call(self, function: str, *args: Any, timeout_s: float = 400) -> list[Any]:
        """What "module:function" returns in each process for these arguments, all by JSON."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(json.dumps([function, args]) + "\n")
            child.stdin.flush()
        results: dict[int, Any] = {}
        printed = ""
        while len(results) < len(self._children):
            i, line = self._lines.get(timeout=timeout_s)
            assert line, f"process {i} ended in {function}:\n{printed[-4000:]}"
            if line.startswith(RESULT):
                results[i] = json.loads(line.removeprefix(RESULT))
            else:
                printed += line
        return [results[i] for i in range(len(self._children))]

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        for reader, child in zip(self._readers, self._children, strict=True):
            reader.join()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()


def descendants(pid: int) -> set[int]:
    """The children of a process, theirs, and so on."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def main() -> None:
    """Child of a `ProcessPool`: join the job, then call functions until the input ends."""
    import importlib

    from dflop_jax import DistributedConfig
    from dflop_jax.distributed.initialize import initialize
    from dflop_jax.train.run_context import use_cache

    n, i, port, devices = map(int, sys.argv[1:])
    initialize(DistributedConfig(f"{LOOPBACK}:{port}", n, i), plan_devices=n * devices)
    use_cache(CACHE)
    for line in sys.stdin:
        name, args = json.loads(line)
        module, function = name.split(":")
        result = getattr(importlib.import_module(module), function)(*args)
        print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()


def running(text: str):
    """In place of `children.program`: every child runs this text, where PATHS stands for folders
    that it imports from first."""
    return lambda _, paths: text.replace("PATHS", repr([*paths]))
