"""Hosts that are not there: network namespaces with names and addresses, joined by a switch.

Needs root, `ip` and `tc` (Debian: iproute2), `unshare` and `nsenter`. Processes, files and cores
are those of this machine; what the hosts have of their own is a name, an address, ports and a link,
so that links can be slow and hosts cut off from each other or switched off.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.219.7"
_SWITCH = "dflop-switch"
_NEEDED = "ip", "tc", "unshare", "nsenter"
_ENDED_S = 10.0  # after SIGKILL


@dataclass(frozen=True)
class Host:
    """Host number `index`; its name and its address; `names` is its /etc/hosts."""

    index: int
    names: Path

    @property
    def name(self) -> str:
        return f"dflop-h{self.index}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.index + 1}"

    def command(self, *words: str) -> list[str]:
        """What runs `words` on this host."""
        inside = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount"]
        named = f'mount --bind {self.names} /etc/hosts && hostname "$0" && exec "$@"'
        return [*inside, "sh", "-c", named, self.name, *words]

    def pids(self) -> list[int]:
        """The processes that run on this host."""
        words = "ip", "netns", "pids", self.name
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        return [int(pid) for pid in said.split()]

    def switch_off(self) -> None:
        """Kill all that runs on this host, as a loss of power does."""
        deadline = time.monotonic() + _ENDED_S
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: processes {pids} stay")
            time.sleep(0.05)


@dataclass(frozen=True)
class Hosts:
    """Some hosts; each reaches every other."""

    hosts: tuple[Host, ...]

    def cut(self, *sides: Sequence[int]) -> None:
        """Let only hosts of one side reach each other: what is sent to others is lost, silently."""
        for bridge, side in enumerate(sides):
            for index in side:
                _in_switch("ip", "link", "set", f"port{index}", "master", f"side{bridge}")

    def join(self) -> None:
        """Let all reach each other again."""
        self.cut([h.index for h in self.hosts])

    def limit(self, rate: str | None) -> None:
        """Let each host's link carry so much in each direction, as `tc` says it; None: all that the
        kernel moves."""
        for host in self.hosts:
            _limit(host, rate)


def missing() -> str:
    """What is needed and not there, in words; "" for nothing."""
    if os.geteuid():
        return "needs root, to make hosts with links of their own"
    absent = [name for name in _NEEDED if shutil.which(name) is None]
    return f"needs {', '.join(absent)} (Debian: apt-get install iproute2 util-linux)" * bool(absent)


@contextmanager
def virtual_hosts(number: int, rate: str | None = None) -> Iterator[Hosts]:
    """Hosts that are gone, with all that runs on them, at the end.

    Args:
      rate: what a host's link lets through in each direction, as `tc` says it; None: as much as the
        kernel moves.
    """
    with tempfile.NamedTemporaryFile("w", prefix="dflop-hosts-") as names:
        names.write("127.0.0.1 localhost\n")
        hosts = Hosts(tuple(Host(i, Path(names.name)) for i in range(number)))
        names.writelines(f"{h.address} {h.name}\n" for h in hosts.hosts)
        names.flush()
        with _networks(hosts, rate):
            yield hosts


@contextmanager
def _networks(hosts: Hosts, rate: str | None) -> Iterator[None]:
    try:
        _run("ip", "netns", "add", _SWITCH)
        for side in range(len(hosts.hosts)):
            _in_switch("ip", "link", "add", f"side{side}", "type", "bridge")
            _in_switch("ip", "link", "set", f"side{side}", "up")
        for host in hosts.hosts:
            _add(host, rate)
        yield
    finally:
        for host in hosts.hosts:
            with suppress(subprocess.CalledProcessError):  # it was not made
                host.switch_off()
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", _SWITCH], check=False, capture_output=True)


def _add(host: Host, rate: str | None) -> None:
    _run("ip", "netns", "add", host.name)
    port = ("type", "veth", "peer", "name", f"port{host.index}", "netns", _SWITCH)
    _run("ip", "link", "add", "eth0", "netns", host.name, *port)
    _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"))
    for link in ("eth0", "lo"):
        _run(*host.command("ip", "link", "set", link, "up"))
    _in_switch("ip", "link", "set", f"port{host.index}", "master", "side0")
    _in_switch("ip", "link", "set", f"port{host.index}", "up")
    if rate:
        _limit(host, rate)


def _limit(host: Host, rate: str | None) -> None:
    shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms") if rate else ("pfifo",)
    _run(*host.command("tc", "qdisc", "replace", "dev", "eth0", "root", *shape))


def _in_switch(*words: str) -> None:
    _run("ip", "netns", "exec", _SWITCH, *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
