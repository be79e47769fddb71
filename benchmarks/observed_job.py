"""A launched run, watched from outside: its processes, its rows, what it prints, where it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from host_processes import begun, environments, parent

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cluster.variables import PROCESS_ID_ENV
from dflop_jax.report.evaluation_rows import EVALUATIONS
from dflop_jax.report.run_folder import CHECKPOINTS, METRICS

MARK_ENV = "DFLOP_KILLS"  # in the environment of a job and all it starts
LAUNCHER = -1
OTHERS = 1000  # from here on: processes that are no trainer
EXCHANGED_BYTES = 2000  # of a connection: more than any message of the watch over peers
AGAIN = "has done a step"  # what a launcher says of a restart
RESTART = "; restart "  # and as it begins one


# A launcher is killed when this program ends, however that ends, and what it started goes with it.
# Only Linux has prctl; 1 is PR_SET_PDEATHSIG.
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Job:
    """A launched run under observation, with what it prints in a file."""

    def __init__(self, command: list[str], run_dir: Path, log: Path):
        self.run_dir, self.log, self._mark = run_dir, log, uuid.uuid4().hex
        self._said_before = log.stat().st_size if log.exists() else 0
        environment = os.environ | {MARK_ENV: self._mark}
        with log.open("ab") as out:
            self.launcher = subprocess.Popen(
                [sys.executable, "-c", ENDS_WITH_PARENT, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def said(self) -> str:
        """What this job has printed, in one line."""
        text = self.log.read_bytes()[self._said_before :].decode(errors="replace")
        return " ".join(text.split())

    def members(self) -> dict[int, int]:
        """Process id of every process of the job: LAUNCHER's, then the trainers', by number; what
        they started has numbers from OTHERS, and so have those that wait to take a trainer's
        place."""
        members = {}
        for pid, environ in sorted(environments(), key=lambda process: begun(process[0])):
            if environ.get(MARK_ENV) == self._mark:
                is_child = pid != self.launcher.pid and parent(pid) == self.launcher.pid
                index = environ.get(PROCESS_ID_ENV)
                if pid == self.launcher.pid:
                    members[LAUNCHER] = pid
                elif is_child and index is not None and int(index) not in members:
                    members[int(index)] = pid
                else:
                    members[OTHERS + pid] = pid
        return members

    def trainers(self) -> dict[int, int]:
        """Process id of every trainer."""
        return {i: pid for i, pid in self.members().items() if 0 <= i < OTHERS}

    def helpers(self, module: str) -> list[int]:
        """Processes of the job, started by its trainers, that run a module."""
        pids = []
        for number, pid in self.members().items():
            if number >= OTHERS:
                with suppress(OSError):
                    if module in Path(f"/proc/{pid}/cmdline").read_text():
                        pids.append(pid)
        return pids

    def ended(self) -> bool:
        return self.launcher.poll() is not None

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came true before the job ended or the time was over."""
        deadline = time.monotonic() + limit_s
        while not self.ended() and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.002)
        return False

    def rows(self, name: str = METRICS) -> int:
        """Rows of a file of the run folder."""
        path = self.run_dir / name
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def evaluations(self) -> int:
        return self.rows(EVALUATIONS)

    def restarts(self) -> int:
        """Restarts that have been begun."""
        return self.said().count(RESTART)

    def recoveries(self) -> int:
        """Restarts that have done a step."""
        return self.said().count(AGAIN)

    def saving(self) -> bool:
        """Whether a checkpoint has been begun and not committed."""
        folder = self.run_dir / CHECKPOINTS
        begun = list(folder.glob("[0-9]*")) if folder.exists() else []
        begun = [f for f in begun if not f.suffix]  # not those that were set aside
        return len(begun) > len(CheckpointStore(folder).steps())

    def exchanging(self) -> bool:
        """Whether bytes that are no sign of life are on their way between trainers."""
        return any(map(_has_unread_bytes, self.trainers().values()))

    def saved(self) -> tuple[int, ...]:
        """Steps of the checkpoints that are there."""
        return CheckpointStore(self.run_dir / CHECKPOINTS).steps()

    def end(self) -> None:
        """Kill what is left of it."""
        for pid in self.members().values():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.launcher.wait()


def _has_unread_bytes(pid: int) -> bool:
    """Whether a process has a connection with `EXCHANGED_BYTES` that wait to be sent or read."""
    sockets = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(link))
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            waiting = max(int(n, 16) for n in words[4].split(":"))
            if waiting >= EXCHANGED_BYTES and f"socket:[{words[9]}]" in sockets:
                return True
    return False


def state_of(pid: int) -> str:
    """What a process's main thread does: R, S, D, T, t, Z; "" where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
