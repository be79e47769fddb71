"""A plan's programs while it is tried out: does the memory of the devices hold them?

Processes match the transfers between them by counting these (`communicator`): none may leave out
what the others wait for. So what a program takes is compared with what is free before it is run,
and the others are told before they depend on it. One that fails all the same gives zeros, which are
sent in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from dflop_jax.pipeline.communicator import zeros
from dflop_jax.pipeline.out_of_memory import check_room, ran_out, says_free
from dflop_jax.pipeline.programs import Program, Programs, forward_kind, output_structs
from dflop_jax.records import FORWARD, NO_GROUP, Group, Task


class Trial:
    """`Programs` that go on where memory does not hold one of them; `failed` is the first error."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self.failed: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def of_segment(self, name: str, group: Group, kind: Any) -> Program:
        program = self._programs.of_segment(name, group, kind)
        return partial(self._run, program, (name, kind, group.shape))

    def of_update(self, name: str, direction: str) -> Program:
        return partial(
            self._run, self._programs.of_update(name, direction), (name, direction, None)
        )

    def check_room(self, task: Task, groups: Sequence[Group], *, evaluate: bool) -> None:
        """OutOfMemory unless this process's devices have what a task's program takes."""
        programs, name = self._programs, task.segment
        if name not in programs.local:
            return
        local = list(programs.segments[name].mesh.local_devices)
        if not says_free(local):  # what it takes need not be asked of the compiler
            return
        program: Any
        if task.group == NO_GROUP:
            program = programs.of_update(name, task.direction)
        else:
            forward = task.direction == FORWARD
            kind = forward_kind(programs, name, evaluate=evaluate) if forward else task.direction
            program = programs.of_segment(name, groups[task.group], kind)
        check_room(f"{task.direction} of {name}", needed_bytes(program), local)

    def _run(self, program: Program, outputs: tuple[str, str, Any], *args: Any) -> Any:
        try:
            return program(*args)
        except jax.errors.JaxRuntimeError as e:
            if not ran_out(e):
                raise
            self.failed = self.failed or e
        return jax.tree.map(zeros, output_structs(self._programs, *outputs))


def needed_bytes(program: jax.stages.Compiled) -> float:
    """Bytes on a device that a program takes beside its arguments, by its compiler."""
    analysis = program.memory_analysis()
    if analysis is None:
        return 0.0
    new_bytes = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return float(analysis.temp_size_in_bytes + max(0, new_bytes))
