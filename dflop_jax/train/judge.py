"""What a skipped step was: a device's fault that passed, one that stays, or the data.

A step whose update is left out leaves the state as it was, but the next one is under way by the
time that is known. So the run goes back to the newest checkpoint before it and comes to it again,
bit for bit. Gradients that are well this time were hurt by a fault that passed, and nothing of it
is left. Those that are not may come of a device that computes wrong always: the devices are
compared (`device_check`). Where these agree, the run goes back once more and comes to the step on
other devices: every part of the plan moves on to the next host, process or device. Gradients that
are well there were hurt by the devices here; else it is the data, or what the parameters have come
to. The run then goes on where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cluster.ending import BrokenDevice
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import Plan
from dflop_jax.report.run_folder import CHECKPOINTS
from dflop_jax.train.device_check import DeviceCheck, Differing
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.timing import make_executor


class Judge:
    """Judges the skipped steps of a run, over all times that it goes back; on every process alike.

    Args:
      check: compares the run's devices.

    Attributes:
      devices: on which the run computes, in the order that its plan counts them.
    """

    def __init__(self, place: Workplace, check: DeviceCheck):
        self._on = place.config.train.replay_skips
        self._every = place.config.train.check_every
        self._place, self._check = place, check
        self.devices = place.devices
        self._again: int | None = None  # the step that is run again
        self._is_moved = False  # on other devices
        self._judged: set[int] = set()

    def warm_up(self) -> None:
        """Compile what it runs, before the first step."""
        if self._on or self._every:
            self._check.warm_up()

    def goes_back(self, step: int, *, applied: bool, say: Callable[[str], None]) -> bool:
        """Whether the run is to come to a finished step again, on `devices`; says what a step was
        that has been run again.

        Raises:
          BrokenDevice: a device computes wrong.
        """
        if step == self._again:
            return self._is_to_move(step, applied, say)
        if applied or not self._on or step in self._judged:
            return False
        self._again = step
        say(f"step {step} is skipped: going back to run it again")
        return True

    def _is_to_move(self, step: int, applied: bool, say: Callable[[str], None]) -> bool:
        """Whether a step that has been run again is to be run on other devices, too."""
        was_moved, moved = self._is_moved, moved_on(self._place)
        self._is_moved = False
        again = f"step {step}, run again from the same state"
        if was_moved and applied:
            raise BrokenDevice(
                f"{again} on others, is well: one of the devices before computes wrong, "
                "though none did in the check (persistent); look at them one by one"
            )
        if was_moved:
            say(f"{again} on others, is skipped as well: the cause is its data or parameters")
        elif applied:
            say(f"{again}, is well: a transient fault, undone")
        else:
            say(f"{again}, is skipped again")
            self.compare(step, self._check.look_at_all(), say)
            if moved != self._place.devices:
                say(f"step {step}: all devices compute alike; going back to run it on others")
                self.devices, self._is_moved = moved, True
                return True
            say(f"step {step}: there is one device, so the cause is its data or parameters")
        self._again = None
        self._judged.add(step)
        return False

    def is_due(self, done: int) -> bool:
        """Whether devices are to be compared after so many steps."""
        return bool(self._every) and done % self._every == 0

    def look(self, done: int, say: Callable[[str], None]) -> None:
        """Compare the devices whose turn it is.

        Raises:
          BrokenDevice: one computes wrong, twice.
        """
        self.compare(done, self._check.look(), say)

    def compare(self, step: int, differing: Differing | None, say: Callable[[str], None]) -> None:
        """Say which devices differ; BrokenDevice where they do so again."""
        if differing is None:
            return
        names = self._check.names(differing)
        line = f"step {step}: {names} gave other bits than the rest ({differing.kind})"
        if differing.kind == "transient":
            say(f"{line}; steps since the last check may be wrong")
            return
        process, hosts = self._check.process_of(differing), self._place.hosts
        host = hosts[process] if process is not None and hosts else ""
        why = f"{line}; leave its host out{f' ({host})' if host else ''}"
        raise BrokenDevice(why, host, process)


def moved_on(place: Workplace) -> list[jax.Device]:
    """A run's devices, each place in the plan taken by the device of the next host; where hosts
    differ or there is one, of the next process, else by the next device."""
    devices, n = place.devices, 1
    by_process: dict[int, list[jax.Device]] = {}
    for d in devices:
        by_process.setdefault(d.process_index, []).append(d)
    for parts in (list(by_process.values()), place.by_host):
        together = [d for part in parts for d in part] == devices
        if len(parts) > 1 and together and len({len(part) for part in parts}) == 1:
            n = len(parts[0])
    return [*devices[n:], *devices[:n]]


def go_back(place: Workplace, plan: Plan, step: int) -> Executor | None:
    """Remove the checkpoints after a step's state, so that the run is resumed at it or before; the
    plan's executor where none is left, as then no checkpoint says what it was."""
    store, left = CheckpointStore(Path(place.config.run_dir) / CHECKPOINTS), b""
    if place.peers.is_hub:
        for saved in store.steps():
            if saved > step:
                store.discard(saved)
        left = b"x" if store.steps() else b""
    return None if place.peers.share("left to go back to", left) else make_executor(place, plan)
