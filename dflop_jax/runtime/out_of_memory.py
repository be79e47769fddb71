"""Detects that a device's memory is too small, from its free bytes or from XLA's error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax

from dflop_jax.runtime.communicator import zeros
from dflop_jax.runtime.programs import Key, Program, Programs, output_structs

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = r"([\d.]+) ?([KMGT]?)(?:i?B|\b)"
# XLA's messages depend on the allocator: missing bytes, or requested and free bytes.
_EXCEEDED_BYTES = re.compile(rf"[Ee]xceeded \w+ capacity by {_NUMBER}")
_REQUESTED_BYTES = re.compile(rf"(?:allocat|reserv)(?:e|ing) {_NUMBER}")
_FREE_BYTES = re.compile(rf"[Tt]here (?:are|is) {_NUMBER} free")


class OutOfMemory(RuntimeError):
    """A device's memory is too small by `short_bytes`; 0: unknown."""

    def __init__(self, message: str, short_bytes: float = 0.0):
        super().__init__(message)
        self.short_bytes = short_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device ran out of memory."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, OutOfMemory)


def short_bytes(error: BaseException, devices: Iterable[jax.Device]) -> float:
    """Return the missing bytes according to the error and the devices; 0: unknown."""
    if isinstance(error, OutOfMemory):
        return error.short_bytes
    text = str(error)
    if exceeded := _EXCEEDED_BYTES.search(text):
        return _parse_bytes(exceeded)
    requested, free = _REQUESTED_BYTES.search(text), _FREE_BYTES.search(text)
    if not requested:
        return 0.0
    available_bytes = _parse_bytes(free) if free else free_bytes(devices)
    # Free memory may be fragmented, and then exceed the request.
    return max(0.0, _parse_bytes(requested) - available_bytes)


def free_bytes(devices: Iterable[jax.Device]) -> float:
    """Return the smallest free bytes of the devices that report them; inf if none does (CPU)."""
    stats = [d.memory_stats() or {} for d in devices]
    reported = [s for s in stats if s.get("bytes_limit")]
    return min((s["bytes_limit"] - s.get("bytes_in_use", 0) for s in reported), default=math.inf)


def check_free_memory(program: str, needed_bytes: float, devices: Iterable[jax.Device]) -> None:
    """Raise OutOfMemory if a device reports fewer free bytes than needed."""
    if (missing_bytes := needed_bytes - free_bytes(devices)) > 0:
        raise OutOfMemory(f"{program} needs {needed_bytes:.0f} more bytes", missing_bytes)


def _parse_bytes(number: re.Match[str]) -> float:
    return float(number[1]) * _UNITS[number[2]]


class TolerantPrograms:
    """`Programs` that continue when a program runs out of memory; `failed` is the first error.

    Processes match the transfers between them by counting (`communicator`), so no process may skip
    a transfer. A program's bytes are therefore compared with the free bytes before it runs. If the
    program fails nevertheless, zeros are returned and sent in place of its outputs.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        self.failed: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def program(self, key: Key) -> Program:
        return partial(self._run, key)

    def check_free_memory(self, key: Key) -> None:
        """Raise OutOfMemory if a program needs more bytes than this process's devices have free."""
        if key[0] not in self._programs.local_segments:
            return
        analysis = self._programs.compiled[key].memory_analysis()
        if analysis is not None:  # bytes beside its arguments, according to its compiler
            new_bytes = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
            needed_bytes = float(analysis.temp_size_in_bytes + new_bytes)
            devices = self._programs.segments[key[0]].mesh.local_devices
            check_free_memory(f"{key[-1]} of {key[0]}", needed_bytes, devices)

    def _run(self, key: Key, *args: Any) -> Any:
        try:
            return self._programs.program(key)(*args)
        except jax.errors.JaxRuntimeError as e:
            if not is_out_of_memory(e):
                raise
            self.failed = self.failed or e
        return jax.tree.map(zeros, output_structs(self._programs, key))
