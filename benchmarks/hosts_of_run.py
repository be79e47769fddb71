"""A run on hosts that can be lost and come back: launchers on this machine that play them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from observed_job import ENDS_WITH_PARENT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port
from dflop_jax.report.run_folder import METRICS, read_metrics

LIMIT_S = 900.0  # nothing takes as long on any machine


class HostsOfRun:
    """Launchers with one process each, which play the hosts of a run on this machine.

    Args:
      folder: of the run and its log.
      options: of the launchers.
      train: what each starts, from "dflop train" on, for the run's folder.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        hosts: int,
        options: Sequence[str],
        train: Callable[[Path], Sequence[str]],
    ):
        self.run_dir, self.log = folder / name, folder / f"{name}.log"
        self._addresses = ",".join(str(Address(LOOPBACK, free_port())) for _ in range(hosts))
        self._hosts, self._options, self._train = hosts, options, train(self.run_dir)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, host: int) -> None:
        """Start a host's launcher."""
        command = [
            sys.executable, "-c", ENDS_WITH_PARENT, sys.executable, "-m", "dflop_jax.cli",
            "launch", "-n", "1", "--devices-per-process", "1", *self._options,
            "--coordinator", self._addresses, "--hosts", str(self._hosts), "--host", str(host),
            "--", *self._train,
        ]  # fmt: skip
        with self.log.open("ab") as out:
            self._running[host] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def kill(self, host: int) -> float:
        """Kill a host's launcher, and with it its process; the moment."""
        killed_s = time.time()
        process = self._running.pop(host)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return killed_s

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            codes = {h: p.poll() for h, p in self._running.items()}
            assert not any(codes.values()), f"{codes}: {self.said()[-3000:]}"
            assert time.monotonic() < deadline, f"{self.log}: nothing happens"
            time.sleep(0.05)

    def await_end(self) -> None:
        for process in self._running.values():
            code = process.wait(LIMIT_S)
            assert code == 0, f"exit code {code}: {self.said()[-3000:]}"

    def end(self) -> None:
        """End all that is left, whatever went wrong."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def rows(self) -> int:
        path = self.run_dir / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def losses(self) -> list[float]:
        rows = read_metrics(self.run_dir)
        assert [r["step"] for r in rows] == list(range(len(rows))), "steps are lost or doubled"
        return [r["loss"] for r in rows]


def flat(text: str) -> str:
    """What was said, in one line, whatever the terminal's width did to it."""
    return " ".join(text.split())
