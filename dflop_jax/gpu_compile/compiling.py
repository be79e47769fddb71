"""Compiles plans for chips that are not here, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from dflop_jax.children import Child
from dflop_jax.gpu_compile.child import CompileJob, CompileRequest, Line, compile_jobs
from dflop_jax.gpu_compile.chips import find_chip
from dflop_jax.gpu_compile.memory import device_memory, verdict
from dflop_jax.gpu_compile.reports import CompileReport, ProgramReport, SegmentState
from dflop_jax.gpu_compile.toolchain import compiler_environment
from dflop_jax.hardware import find_hardware

OnProgress = Callable[[int, int], None]
_SERVES = compile_jobs.__module__


@dataclass
class _Known:
    """What became known of a job so far."""

    refused: str = ""
    states: tuple[SegmentState, ...] = ()
    n_programs: int = 0
    programs: list[ProgramReport] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return bool(self.refused) or 0 < self.n_programs == len(self.programs)


def compile_plan(job: CompileJob, on_progress: OnProgress | None = None) -> CompileReport:
    """Compile every program of a plan for the chip of its configuration.

    Raises:
      ValueError: the compiler is not installed, the chip is not described, or the plan does not fit
        the model or the devices.
    """
    (answer,) = compile_plans([job], on_progress)
    if isinstance(answer, str):
        raise ValueError(answer)
    return answer


def compile_plans(
    jobs: Sequence[CompileJob], on_progress: OnProgress | None = None
) -> Iterator[CompileReport | str]:
    """Compile the programs of several plans, equal ones once. Yields a report of each plan, or why
    it is refused, in their order and as soon as it is known.

    A program at which the compiler's process dies is reported so, and the rest is compiled by
    another one.

    Args:
      on_progress: called with (programs done, programs known so far).

    Raises:
      ValueError: the compiler is not installed, or a chip is not described.
      RuntimeError: the compiler's process died before it came to a program.
    """
    for job in jobs:
        find_chip(job.config.plan.hardware)
    environment = compiler_environment()
    known = [_Known() for _ in jobs]
    n_told = 0
    while True:
        n_done = sum(len(k.programs) for k in known)
        begun: tuple[int, ProgramReport] | None = None
        # The experiment's folder comes first, as it does in this process.
        child = Child(_SERVES, paths=[str(Path.cwd())], environment=environment, keeps_words=True)
        child.tell(msgspec.json.encode(CompileRequest(tuple(jobs), n_done)), is_last=True)
        for answer in child.answers():
            line = msgspec.json.decode(answer, type=Line)
            _note(known[line.job], line)
            if line.begun:
                begun = line.job, line.begun
            if line.done:
                begun = None
                if on_progress:
                    n_done = sum(len(k.programs) for k in known)
                    on_progress(n_done, sum(k.n_programs for k in known))
            while n_told < len(jobs) and known[n_told].is_done:
                yield _answer(jobs[n_told], known[n_told])
                n_told += 1
        if child.end() == 0:
            assert n_told == len(jobs), (n_told, len(jobs))
            return
        died = f"the compiler died {child.last_words()}"
        if begun is None:
            raise RuntimeError(died)
        known[begun[0]].programs.append(replace(begun[1], error=died))


def _note(known: _Known, line: Line) -> None:
    if line.refused:
        known.refused = line.refused
    if line.n_programs:
        known.states, known.n_programs = line.states, line.n_programs
    if line.done:
        known.programs.append(line.done)


def _answer(job: CompileJob, known: _Known) -> CompileReport | str:
    """The report of a job whose programs are all done, or why it is refused."""
    if known.refused:
        return known.refused
    hardware = find_hardware(job.config.plan.hardware)
    budget = job.config.plan.memory_bytes or hardware.usable_bytes
    memory = device_memory(known.states, known.programs, job.plan.predicted.peak_bytes)
    fits, words = verdict(hardware.name, budget, memory, known.programs, known.states)
    return CompileReport(
        chip=hardware.name,
        n_devices=job.plan.layout.n_devices,
        n_nodes=-(-job.plan.layout.n_devices // hardware.devices_per_node),
        budget_bytes=budget,
        programs=tuple(known.programs),
        memory=memory,
        fits=fits,
        verdict=words,
    )
