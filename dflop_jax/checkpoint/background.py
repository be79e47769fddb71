"""What is written of a run's state while its steps go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Waiting = Callable[[], AbstractContextManager[None]]


class Copying:
    """The copy to the host that updates wait for. The executor holds it, so it holds none: with
    the executor its state goes, which the next one needs the memory of."""

    def __init__(self, waiting: Waiting) -> None:
        self.done = threading.Event()
        self.done.set()
        self.waited_s = 0.0
        self._waiting = waiting

    def wait(self) -> None:
        if self.done.is_set():
            return
        start = time.perf_counter()
        with self._waiting():
            self.done.wait()
        self.waited_s += time.perf_counter() - start


class Background:
    """Runs one thing at a time in a thread.

    Args:
      waiting: entered where training waits for it.
    """

    def __init__(self, waiting: Waiting) -> None:
        self.copying = Copying(waiting)
        self._waiting = waiting
        self._thread: threading.Thread | None = None
        self._begun_s = 0.0  # what beginning has taken

    @property
    def stall_s(self) -> float:
        """What it has kept training waiting."""
        return self._begun_s + self.copying.waited_s

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Wait until what is under way has ended; this and what is done inside is a stall."""
        start = time.perf_counter()
        self.wait()
        yield
        self._begun_s += time.perf_counter() - start

    def begin(self, run: Callable[[], None]) -> None:
        """Run this, which sets `copying.done` once it has copied; nothing may be under way."""
        assert not self.is_busy
        self.copying.done.clear()
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until what is under way has ended."""
        if self._thread is not None:
            with self._waiting():
                self._thread.join()
            self._thread = None
