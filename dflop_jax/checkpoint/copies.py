"""Copies of a run's state in the memory of the agents of its hosts (`dflop launch`).

A copy is a checkpoint whose files are not on a disk: those of each process are with the agent of
its own host and with that of the next one, so that neither the loss of processes nor that of a host
takes the state with it. Of replicas one is copied. The manifest is made once both have every file,
and then goes to all agents. So a copy that has a manifest anywhere, and every file somewhere, is
whole; anything less is none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress

import msgspec

from dflop_jax.checkpoint.format import (
    BLOCK_BYTES,
    ArrayPiece,
    ArraySpec,
    CorruptCheckpoint,
    Manifest,
    WrittenPart,
    decode_manifest,
)
from dflop_jax.checkpoint.reader import CheckpointReader
from dflop_jax.checkpoint.writer import ProcessFile
from dflop_jax.cluster.copy_client import CopyClient
from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.shelf import LEAST_FREE_BYTES, CopyName, Held

log = logging.getLogger(__name__)
KEPT = 2  # copies at a time: the last one that is whole, and the one that is made
GB, MB = 1e9, 1e6


class Copies:
    """The copies of a run, as one of its processes makes and reads them.

    Args:
      agents: of the run's hosts.
      here: which of them is that of this process's host.
      first: whether this is the first process of its host.
      run: names the run; start: which of its starts this is.
    """

    def __init__(
        self,
        agents: Sequence[CopyClient],
        here: int,
        *,
        first: bool,
        run: str,
        start: int,
        peers: Peers,
    ):
        self._agents, self._here, self._first = agents, here, first
        self._run, self._start, self._peers = run, start, peers

    def name(self, step: int) -> CopyName:
        """The copy that this start makes after so many steps."""
        return CopyName(self._run, self._start, step)

    # ---- what they take ----

    def begin(self, went_on: CopyName | None, n_bytes: int) -> str:
        """All processes begin to copy, after the run went on from a copy or (None) had none to go
        on from; this one so many bytes. What copies take, in words.

        Raises:
          ValueError: a host's memory does not hold them.
        """
        self.keep_only(went_on)
        mine = _Need(self._here, n_bytes)
        if self._first:
            with suppress(OSError):
                room = self._agents[self._here].room()
                mine = _Need(self._here, n_bytes, room.held, room.free)
        answers = self._peers.gather("copies/room", msgspec.msgpack.encode(mine))
        needs = [msgspec.msgpack.decode(a, type=_Need) for a in answers]
        told = _too_large(needs, len(self._agents)) if self._peers.is_hub else ""
        if why := self._peers.share("copies/refused", told.encode()).decode():
            raise ValueError(why)
        if not needs:
            return ""
        total = sum(n.n_bytes for n in needs)
        most = max(needed_bytes(needs, len(self._agents)).values())
        return f"copies take {_size(total)} each, {_size(most)} of a host's memory at most"

    # ---- making one ----

    def write(
        self, step: int, specs: Iterable[ArraySpec], pieces: Iterable[ArrayPiece], process: int
    ) -> WrittenPart:
        """Have the agents keep what this process holds; they have all of it when it returns.

        Raises:
          OSError: one is gone or has no memory for it.
        """
        file, crc32s = ProcessFile.of(specs, pieces), list[int]()
        if not file.parts:
            return file.written(process, ())
        holders = self._holders()
        with ExitStack() as stack:
            for agent in holders:
                put = agent.putting(self.name(step), process, file.n_bytes, BLOCK_BYTES)
                stack.enter_context(put)
            for block in file.blocks(crc32s):
                for agent in holders:
                    agent.send(block)
            for agent in holders:
                agent.end_put(crc32s)
        return file.written(process, crc32s)

    def seal(self, step: int, manifest: bytes) -> None:
        """Give the agent of this host the manifest of a copy whose files are all there."""
        if self._first:
            self._agents[self._here].seal(self.name(step), manifest)

    def _holders(self) -> list[CopyClient]:
        both = {self._here, (self._here + 1) % len(self._agents)}
        return [self._agents[i] for i in sorted(both)]

    # ---- reading one ----

    def whole(self) -> list[CopyName]:
        """The copies of the run that can be read, newest first."""
        by_name: dict[CopyName, list[Held]] = {}
        for agent in self._agents:
            with suppress(OSError):  # what it had is gone
                for held in agent.held(self._run):
                    by_name.setdefault(held.name, []).append(held)
        names = sorted(by_name, key=lambda n: (n.step, n.start), reverse=True)
        return [n for n in names if self._is_whole(n, by_name[n])]

    def _is_whole(self, name: CopyName, held: Sequence[Held]) -> bool:
        if not any(h.sealed for h in held):
            return False
        there = {item for h in held for item in h.files.items()}
        with suppress(CorruptCheckpoint):
            parts = self._manifest(name).parts
            return all((p.process, p.n_bytes) in there for p in parts if p.n_bytes)
        return False

    def _manifest(self, name: CopyName) -> Manifest:
        for agent in self._agents:
            with suppress(OSError):
                if data := agent.manifest(name):
                    return decode_manifest(data)
        raise CorruptCheckpoint(f"{_words(name)}: no agent has its manifest")

    def open(self, name: CopyName) -> CheckpointReader:
        """A reader of a copy.

        Raises:
          CorruptCheckpoint: it is gone.
        """
        manifest = self._manifest(name)
        nearest = sorted(self._agents, key=lambda a: a is not self._agents[self._here])
        return CheckpointReader(_Source(name, nearest), manifest)

    def keep_only(self, name: CopyName | None) -> None:
        """Have the agent of this host drop all copies of the run but one, which the run goes on
        from: another is of steps that are done anew."""
        if self._first:
            with suppress(OSError):  # it has none then
                self._agents[self._here].keep_only(self._run, name)


class _Need(msgspec.Struct, frozen=True):
    """What a process on a host copies; what its agent holds by now and its host has free."""

    host: int
    n_bytes: int
    held: int = 0
    free: int | None = None


def needed_bytes(needs: Sequence[_Need], n_hosts: int) -> dict[int, int]:
    """What copies take of each host's memory at most: `KEPT` times the files of its own processes
    and of those of the host before it, and what the former send."""
    own = {h: sum(n.n_bytes for n in needs if n.host == h) for h in range(n_hosts)}
    kept = {h: own[h] + (own[(h - 1) % n_hosts] if n_hosts > 1 else 0) for h in own}
    return {h: KEPT * kept[h] + own[h] for h in own}


def _too_large(needs: Sequence[_Need], n_hosts: int) -> str:
    for host, needed in needed_bytes(needs, n_hosts).items():
        here = [n for n in needs if n.host == host and n.free is not None]
        room = min((n.held + (n.free or 0) - LEAST_FREE_BYTES for n in here), default=needed)
        if needed > room:
            return (
                f"checkpoint.copy_every: copies take {_size(needed)} of the memory of host "
                f"{host}, which has {_size(max(0, room))} for them; set it to 0, or use more "
                "hosts"
            )
    return ""


def _size(n_bytes: float) -> str:
    return f"{n_bytes / GB:.2f} GB" if n_bytes >= GB else f"{n_bytes / MB:.2f} MB"


def _words(name: CopyName) -> str:
    return f"copy of step {name.step}"


class _Source:
    """Where the files of a copy are; the agents are asked in their order."""

    def __init__(self, name: CopyName, agents: Sequence[CopyClient]):
        self._name, self._agents = name, agents

    def __str__(self) -> str:
        return _words(self._name)

    def open(self, process: int) -> _InMemory:
        return _InMemory(self._name, process, self._agents)

    def was_removed(self) -> bool:
        return False


class _InMemory:
    """A process's file, with one of the agents."""

    def __init__(self, copy: CopyName, process: int, agents: Sequence[CopyClient]):
        self.name = f"{_words(copy)}, file of process {process}"
        self._copy, self._process, self._agents = copy, process, list(agents)

    def read(self, offset: int, n_bytes: int) -> bytes:
        while self._agents:
            with suppress(OSError):
                if data := self._agents[0].read(self._copy, self._process, offset, n_bytes):
                    return data
            self._agents.pop(0)  # it has no such file
        raise CorruptCheckpoint(f"{self.name}: missing")
