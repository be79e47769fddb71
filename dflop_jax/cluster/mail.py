"""What others have sent and nobody has taken yet, by key, in the order in which it came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from dflop_jax.cluster.ending import RunFailed

Part: TypeAlias = list[tuple[int, bytes]]  # values by process


class Mail:
    """Messages of one run at a time; those of the next may come early."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[str, deque[Part]] = {}
        self._run = 0
        self._abandoned: set[str] = set()
        self._ended = False

    def new_run(self) -> None:
        """Forget what is left of the run before."""
        with self._changed:
            self._run += 1
            self._abandoned.clear()
            mine = self.full("")
            for old in [k for k in self._arrived if not k.startswith(mine)]:
                del self._arrived[old]

    def full(self, key: str) -> str:
        """The key in this run."""
        return f"{self._run}:{key}"

    def put(self, full_key: str, part: Part) -> None:
        with self._changed:
            self._arrived.setdefault(full_key, deque()).append(part)
            self._changed.notify_all()

    def take(self, key: str) -> Part:
        """The next message under `key`, which this waits for.

        Raises:
          RunFailed: it is abandoned, or the run has ended.
        """
        full = self.full(key)

        def given_up() -> bool:
            return self._ended or any(key.startswith(p) for p in self._abandoned)

        with self._changed:
            self._changed.wait_for(lambda: full in self._arrived or given_up())
            if full not in self._arrived:
                raise RunFailed(f"waiting for {key!r}: the run has ended: start it again")
            waiting = self._arrived[full]
            part = waiting.popleft()
            if not waiting:
                del self._arrived[full]
            return part

    def abandon(self, prefix: str) -> None:
        """Whoever waits for a key that begins so gets RunFailed instead."""
        with self._changed:
            self._abandoned.add(prefix)
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Merge:
    """Puts together what each of some sources gives under a key, and hands it on in that order.

    Args:
      sources: how many there are.
      hand_on: told (key, all their values); it may wait for as long as others take to read.
    """

    def __init__(self, sources: int, hand_on: Callable[[str, Part], None]) -> None:
        self._sources, self._hand_on = sources, hand_on
        self._parts: dict[str, dict[int, deque[Part]]] = {}
        self._lock = threading.Lock()

    def forget_all_but(self, prefix: str) -> None:
        """Forget what is incomplete under keys that begin otherwise."""
        with self._lock:
            for old in [k for k in self._parts if not k.startswith(prefix)]:
                del self._parts[old]

    def add(self, key: str, source: int, part: Part) -> None:
        with self._lock:
            waiting = self._parts.setdefault(key, {})
            waiting.setdefault(source, deque()).append(part)
            if len(waiting) < self._sources:
                return
            whole = [pair for parts in waiting.values() for pair in parts.popleft()]
            left = {source: parts for source, parts in waiting.items() if parts}
            self._parts[key] = left
            if not left:
                del self._parts[key]
            self._hand_on(key, whole)
