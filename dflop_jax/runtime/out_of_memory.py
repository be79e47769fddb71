"""What a device's memory does not hold: told before a program is run, or by XLA's error after; and
a plan's programs while it is tried out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax

from dflop_jax.runtime.communicator import zeros
from dflop_jax.runtime.programs import Key, Program, Programs, output_structs

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = r"([\d.]+) ?([KMGT]?)(?:i?B|\b)"
# XLA's words, by allocator: what it lacks, or what was asked for and what was free.
_EXCEEDED = re.compile(rf"[Ee]xceeded \w+ capacity by {_NUMBER}")
_ASKED = re.compile(rf"(?:allocat|reserv)(?:e|ing) {_NUMBER}")
_FREE = re.compile(rf"[Tt]here (?:are|is) {_NUMBER} free")


class OutOfMemory(RuntimeError):
    """A device's memory does not hold what is to run; `short_bytes` are missing, 0: not known."""

    def __init__(self, what: str, short_bytes: float = 0.0):
        super().__init__(what)
        self.short_bytes = short_bytes


def ran_out(error: BaseException) -> bool:
    """Whether an error is of memory that a device does not have."""
    told = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return told or isinstance(error, OutOfMemory)


def short_bytes(error: BaseException, devices: Iterable[jax.Device]) -> float:
    """Bytes that were missing, as far as the error and the devices tell; 0: not known."""
    if isinstance(error, OutOfMemory):
        return error.short_bytes
    text = str(error)
    if exceeded := _EXCEEDED.search(text):
        return _bytes(exceeded)
    asked, free = _ASKED.search(text), _FREE.search(text)
    if not asked:
        return 0.0
    left = [n for d in devices if (n := free_bytes(d)) is not None]
    room = _bytes(free) if free else min(left, default=None)
    # What is free in pieces too small for it may be more than was asked for.
    return 0.0 if room is None else max(0.0, _bytes(asked) - room)


def free_bytes(device: jax.Device) -> float | None:
    """Bytes of a device that are free; None where it does not say (CPU)."""
    stats = device.memory_stats() or {}
    if not stats.get("bytes_limit"):
        return None
    return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def check_room(what: str, needed_bytes: float, devices: Iterable[jax.Device]) -> None:
    """OutOfMemory unless every one of the devices that says so has as many bytes free."""
    left = [n for d in devices if (n := free_bytes(d)) is not None]
    room = min(left, default=needed_bytes)
    if needed_bytes > room:
        raise OutOfMemory(f"{what} needs {needed_bytes:.0f} bytes more", needed_bytes - room)


def _bytes(number: re.Match[str]) -> float:
    return float(number[1]) * _UNITS[number[2]]


class Trial:
    """`Programs` that go on where memory does not hold one of them; `failed` is the first error.

    Processes match the transfers between them by counting these (`communicator`): none may leave
    out what the others wait for. So what a program takes is compared with what is free before it is
    run, and the others are told before they depend on it. One that fails all the same gives zeros,
    which are sent in its place.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        self.failed: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def program(self, key: Key) -> Program:
        return partial(self._run, key)

    def check_room(self, key: Key) -> None:
        """OutOfMemory unless this process's devices have what a segment's program takes."""
        if key[0] not in self._programs.local:
            return
        taken = self._programs.compiled[key].memory_analysis()
        if taken is not None:  # bytes beside its arguments, by its compiler
            new_bytes = max(0, taken.output_size_in_bytes - taken.alias_size_in_bytes)
            needed_bytes = float(taken.temp_size_in_bytes + new_bytes)
            devices = self._programs.segments[key[0]].mesh.local_devices
            check_room(f"{key[-1]} of {key[0]}", needed_bytes, devices)

    def _run(self, key: Key, *args: Any) -> Any:
        try:
            return self._programs.program(key)(*args)
        except jax.errors.JaxRuntimeError as e:
            if not ran_out(e):
                raise
            self.failed = self.failed or e
        return jax.tree.map(zeros, output_structs(self._programs, key))
