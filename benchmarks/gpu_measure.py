"""Compiles cases, times them in turns, and says of each one line: what `benchmarks/gpu_step.py`
measures with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflop_jax.gpu_compile.chips import CHIPS
from dflop_jax.gpu_compile.hlo_kernels import hlo_kernels
from dflop_jax.hardware import find_hardware
from dflop_jax.profile.efficiency import Efficiency, Table
from dflop_jax.records import Hardware

Line = dict[str, Any]
ROUNDS = 12  # in which every case of a batch has its turn
# All products at 70% of the peak, attention's too, whatever their size.
FLAT = Efficiency(
    matmul=0.7, attention=0.7, attention_back=0.7, attention_pairs=1e-9, half_dim=1e-9, lookup=0.85
)
LEAST_S = 2e-3  # a turn calls a program as often as this takes


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured.

    Attributes:
      device: a GPU, the CPU for a trial, or one that is only described.
      hardware: its data sheet, None where there is none.
      runs: whether programs are run, or compiled only.
    """

    device: jax.Device
    hardware: Hardware | None
    runs: bool
    rounds: int = ROUNDS

    def struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        here = jax.sharding.SingleDeviceSharding(self.device)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      facts: what its line says beside the figures.
      lower: () -> it, ready to be compiled.
      make: () -> its arguments on the device.
      flops, n_bytes: that it needs.
      again: (arguments, outputs) -> arguments of the next call, where some are donated.
      check: outputs -> more facts.
      seen_pairs: see `dflop_jax.gpu_compile.hlo_cost.hlo_cost`.
    """

    facts: Line
    lower: Callable[[], jax.stages.Lowered]
    make: Callable[[], tuple[Any, ...]]
    flops: float = 0.0
    n_bytes: float = 0.0
    again: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda args, _: args
    check: Callable[[Any], Line] = lambda _: {}
    seen_pairs: float = 1.0


@dataclass
class _Timed:
    case: Case
    program: jax.stages.Compiled
    line: Line
    args: tuple[Any, ...] = ()
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    def turn(self) -> None:
        start = time.perf_counter()
        for _ in range(self.calls):
            out = self.program(*self.args)
            self.args = self.case.again(self.args, out)
        jax.block_until_ready(out)
        self.seconds.append((time.perf_counter() - start) / self.calls)


class Deadline:
    """Seconds that a part may take."""

    def __init__(self, seconds: float):
        self._end = time.perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._end


def hardware_of(device: jax.Device) -> Hardware | None:
    """The data sheet of a device that programs can be compiled for; None of others."""
    names = [n for n, chip in CHIPS.items() if device.device_kind.startswith(chip.device)]
    return find_hardware(names[0]) if names else None


def measure(bench: Bench, cases: Sequence[Case], deadline: Deadline) -> Iterator[Line]:
    """A line of each case, in turns with the others: the medians then share what the chip's clock
    did meanwhile. Cases that the deadline or the memory leaves no room for say so."""
    ready = []
    for case in cases:
        if deadline.is_over:
            yield {**case.facts, "skipped": "no time"}
            continue
        try:
            timed = _compiled(bench, case)
            if bench.runs:
                _warm_up(timed)
        except Exception as e:  # of one case: the others are still worth their lines
            yield {**case.facts, "error": " ".join(str(e).split())[:300]}
            continue
        ready.append(timed)
    for _ in range(bench.rounds if bench.runs else 0):
        if deadline.is_over and all(t.seconds for t in ready):
            break
        for timed in ready:
            timed.turn()
    for timed in ready:
        yield timed.line | _figures(bench, timed)


def _compiled(bench: Bench, case: Case) -> _Timed:
    lowered = case.lower()
    start = time.perf_counter()
    program = lowered.compile()
    line = case.facts | {"compile_s": time.perf_counter() - start}
    stats = program.memory_analysis()
    if stats is not None:
        line["temp_bytes"] = stats.temp_size_in_bytes
        line["peak_bytes"] = (
            stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
            - stats.alias_size_in_bytes
        )  # fmt: skip
    if bench.hardware is not None:
        line |= predicted(program, bench.hardware, case.seen_pairs, case.flops)
    return _Timed(case, program, line)


def predicted(
    program: jax.stages.Compiled, hardware: Hardware, seen_pairs: float, flops: float
) -> Line:
    """Milliseconds under the roofline of plans and under the flat one, one kernel after another;
    and shares of the peak that FLOPs needed come to."""
    table = Table.of([hlo_kernels(program.as_text() or "", seen_pairs)], [1], hardware)
    ms, flat_ms = (1e3 * float(table.seconds(e)[0]) for e in (Efficiency(), FLAT))
    line: Line = {"predicted_ms": ms, "flat_ms": flat_ms}
    if flops:
        peak_ms = 1e3 * flops / hardware.bfloat16_flops
        line |= {"peak_ms": peak_ms, "predicted_mfu": peak_ms / ms, "flat_mfu": peak_ms / flat_ms}
    return line


def _warm_up(timed: _Timed) -> None:
    """A call whose outputs are checked, and one that says how many make a turn."""
    args = timed.case.make()
    out = jax.block_until_ready(timed.program(*args))
    timed.line |= timed.case.check(out)
    timed.args = timed.case.again(args, out)
    timed.turn()
    timed.calls = max(1, min(100, int(LEAST_S / timed.seconds.pop())))


def _figures(bench: Bench, timed: _Timed) -> Line:
    if not timed.seconds:
        return {}
    low, middle, high = np.percentile(timed.seconds, [10, 50, 90])
    case, found = timed.case, {"ms": 1e3 * middle, "ms_p10": 1e3 * low, "ms_p90": 1e3 * high}
    if case.flops:
        found["tflops"] = case.flops / middle / 1e12
        if bench.hardware is not None:
            found["of_peak"] = case.flops / middle / bench.hardware.bfloat16_flops
    if case.n_bytes:
        found["gb_per_s"] = case.n_bytes / middle / 1e9
    return found
