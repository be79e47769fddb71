"""The programs of the plan for fewer processes, compiled into the cache while devices train.

jax finds a compiled program again by the numbers of its devices, among others. Processes that go on
without some get the first numbers again, in their order, and so do their devices: what process i
compiles here for its own devices is what process i of fewer will load, whichever is gone. A thread
of low priority does it. Not on GPUs: there compiling times kernels on devices, which train.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax

from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import Plan, to_json
from dflop_jax.report.run_folder import PLANS
from dflop_jax.train.count_programs import count_program
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.program_index import program_index
from dflop_jax.train.timing import make_executor

LOOK_EVERY_S = 1.0  # the run folder may be on a network
# How long the end of a run waits for the program that is being compiled.
END_S = 60.0
_LOWEST_PRIORITY = 19
log = logging.getLogger("dflop_jax")


class _Ended(Exception):
    """The run is over before all is compiled."""


class ProgramsAhead:
    """One process's part: it compiles what it would run as one of `fewer`, and notes that in the
    run folder, where process 0 sees when all have.

    Args:
      fewer, n_devices: processes and devices of the smaller run.
      find: the plan for it; None while there is none.
      make: for tests.
    """

    def __init__(
        self,
        place: Workplace,
        fewer: int,
        n_devices: int,
        find: Callable[[], Plan | None],
        say: Callable[[str], None],
        make: Callable[[Workplace, Plan], Executor] = make_executor,
    ):
        self._fewer, self._find, self._say = fewer, find, say
        self._make, self._process, self._is_hub = make, place.peers.process, place.peers.is_hub
        self._folder = Path(place.config.run_dir, PLANS, f"{fewer}-{n_devices}.programs")
        self._place = replace(place, devices=place.devices[:n_devices])
        self._thread: threading.Thread | None = None
        self._over, self._looked_s, self._begun_s = threading.Event(), 0.0, 0.0
        takes_part = self._process < fewer and place.devices[0].platform == "cpu"
        self._plan: Plan | None = None
        self._is_done = not takes_part

    def look(self) -> None:
        """A step is done: begin to compile once there is a plan; say when all have."""
        now_s = time.monotonic()
        if self._is_done or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        if self._plan is None:
            self._plan = self._find()
            if self._plan is None:
                return
            self._begun_s = now_s
            if self._noted(self._process) == self._name:
                self._is_done = True
                return
            self._thread = threading.Thread(target=self._compile, name="programs-ahead")
            self._thread.daemon = True
            self._thread.start()
        elif not self._thread or not self._thread.is_alive():
            self._is_done = not self._is_hub or self._all_have()

    def close(self) -> None:
        """End with the program that is being compiled."""
        self._over.set()
        if self._thread:
            self._thread.join(END_S)

    def _all_have(self) -> bool:
        if any(self._noted(i) != self._name for i in range(self._fewer)):
            return False
        took_s = time.monotonic() - self._begun_s
        what = f"the programs for {self._fewer} processes are compiled"
        self._say(f"{what}, in {took_s:.0f} s beside the steps")
        return True

    def _compile(self) -> None:
        with suppress(AttributeError, OSError):  # it is one of Linux, for the thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        assert self._plan is not None
        executor: Executor | None = None
        try:
            if self._is_hub:
                count_program(self._plan, self._place.config.cache_dir)
            executor = self._make(self._place, self._plan)
            executor.compile(self._go_on, known=program_index(self._place.config.cache_dir))
            self._folder.mkdir(exist_ok=True)
            self._folder.joinpath(str(self._process)).write_text(self._name)
        except _Ended:
            return
        except Exception as e:  # the run itself needs none of it
            log.warning("programs for %d processes: %s; they are compiled then", self._fewer, e)
            self._is_done = True
        finally:
            if executor:
                executor.close()

    def _go_on(self, done: int, of: int) -> None:
        if self._over.is_set():
            raise _Ended

    @property
    def _name(self) -> str:
        """Of what is compiled: another plan's, or another jax's, are others."""
        assert self._plan is not None
        said = to_json(self._plan.layout) + jax.__version__.encode()
        return hashlib.sha256(said).hexdigest()[:16]

    def _noted(self, process: int) -> str:
        """What a process has compiled."""
        try:
            return self._folder.joinpath(str(process)).read_text()
        except OSError:
            return ""
