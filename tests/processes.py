"""Starts this test suite's multi-process jobs: N interpreters joined by jax.distributed on gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dflop_jax.distributed.processes import LOOPBACK, free_port

ROOT = Path(__file__).resolve().parents[1]
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


def run_processes(
    module: str, n: int, devices: int, args: Sequence[str] = (), *, timeout_s: float = 400
) -> list[str]:
    """Output of each of `n` processes `python -m module ARGS`, each with `devices` CPU devices."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes", module, *map(str, job), *args],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in [(n, i, port, devices) for i in range(n)]
    ]
    try:
        outputs = [p.communicate(timeout=timeout_s)[0] for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()
    for i, (p, output) in enumerate(zip(started, outputs, strict=True)):
        assert p.returncode == 0, f"process {i} ended with {p.returncode}:\n{output[-4000:]}"
    return outputs


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
    """Child: join the job, then run the module's `main(args)`."""
    import importlib

    from dflop_jax import DistributedConfig
    from dflop_jax.distributed.initialize import initialize, shutdown
    from dflop_jax.train.compile_cache import use_cache

    module, n, i, port, devices, *args = sys.argv[1:]
    where = DistributedConfig(f"{LOOPBACK}:{port}", int(n), int(i))
    initialize(where, plan_devices=int(n) * int(devices))
    use_cache(CACHE)
    importlib.import_module(module).main(args)
    assert shutdown()


if __name__ == "__main__":
    main()


def running(text: str):
    """In place of `children.program`: every child runs this text, where PATHS stands for folders
    that it imports from first."""
    return lambda _, paths: text.replace("PATHS", repr([*paths]))
