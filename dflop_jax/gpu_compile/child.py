"""The process that compiles: it reads `CompileRequest` from stdin and writes `Line`s to stdout.

A process of its own, since jax has to find the compiler in its environment when it starts, and
since the compiler ends its process where it meets what it cannot bear.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec

from dflop_jax.children import begin
from dflop_jax.config import Config
from dflop_jax.gpu_compile.chips import absent_devices
from dflop_jax.gpu_compile.hlo_cost import HloCost, hlo_cost
from dflop_jax.gpu_compile.hlo_text import pair_arrays
from dflop_jax.gpu_compile.needed import needed_flops, seen_pairs
from dflop_jax.gpu_compile.reports import ProgramReport, SegmentState
from dflop_jax.pipeline.compiling import jobs, learn, lowering_of
from dflop_jax.pipeline.held import grad_structs, program_structs
from dflop_jax.pipeline.programs import KEEPING, Programs, kinds
from dflop_jax.pipeline.segment import EVALUATE, device_bytes, field_structs, x_structs
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Plan, Shape
from dflop_jax.tasks.graph import Link, in_flight_limit, resources
from dflop_jax.train.prepare import set_up
from dflop_jax.train.timing import make_executor

Tree = Any


@dataclass(frozen=True)
class CompileJob:
    """A plan to compile for the chip that its configuration names (`plan.hardware`)."""

    config: Config
    plan: Plan


@dataclass(frozen=True)
class CompileRequest:
    """Jobs, and how many of their programs, in order, are not to be compiled (again)."""

    jobs: tuple[CompileJob, ...]
    skip: int = 0


@dataclass(frozen=True)
class Line:
    """Something that became known of a job: why it is refused, what its segments hold and how many
    programs it has, a program that is begun, or one that is done."""

    job: int
    refused: str = ""
    states: tuple[SegmentState, ...] = ()
    n_programs: int = 0
    begun: ProgramReport | None = None
    done: ProgramReport | None = None


def main() -> None:
    """Serve one request."""
    lines, out = begin()
    request = msgspec.json.decode(lines.readline(), type=CompileRequest)
    for line in compile_jobs(request):
        out.write(msgspec.json.encode(line) + b"\n")
        out.flush()


def compile_jobs(request: CompileRequest) -> Iterator[Line]:
    """Compile every program of the jobs, one after another; of equal ones the first."""
    known: dict[bytes, ProgramReport] = {}
    place = 0
    for i, job in enumerate(request.jobs):
        try:
            programs = plan_programs(job)
        except ValueError as e:
            yield Line(i, refused=one_line(e))
            continue
        lowerings = jobs(programs)
        yield Line(i, states=segment_states(job.plan, programs), n_programs=len(lowerings))
        for key, lower in lowerings.items():
            place += 1
            if place > request.skip:
                head = described(programs, key)
                yield Line(i, begun=head)
                done = compiled(programs, key, head, lower, known)
                yield Line(i, done=done)


def plan_programs(job: CompileJob) -> Programs:
    """The programs of a job on devices of its chip.

    Raises:
      ValueError: no such chip, or the plan does not fit the model or the devices.
    """
    place = set_up(job.config)
    assert place.hardware is not None, "plan.hardware is checked before a process is started"
    devices = absent_devices(place.hardware.name, place.hardware, job.plan.layout.n_devices)
    return make_executor(replace(place, devices=devices), job.plan).programs


def described(programs: Programs, key: Any) -> ProgramReport:
    """A program's name and place, before it is compiled."""
    name, *rest = key
    segment = lowering_of(programs, key).segment
    kind, words = _words(rest)
    return ProgramReport(
        name=f"{name} {words}",
        segment=name,
        submesh=programs.submesh[name],
        kind=kind,
        mesh=tuple(segment.mesh.devices.shape),
        keeping=KEEPING in key,
    )


def _words(key: list[Any]) -> tuple[str, str]:
    """(kind, words) of the key of a segment's program."""
    if isinstance(key[0], Link):
        link, low, high, backward = key
        back = " back" * backward
        field = f" {link.edge.name}" if link.edge else ""
        return "exchange", f"to {link.target}{field} {low.name}-{high.name}{back}"
    kind = next((k for k in (FORWARD, BACKWARD, EVALUATE, REDUCE, UPDATE, "sum") if k in key), "")
    shapes = [k.name for k in key if isinstance(k, Shape)]
    sizes = ["x".join(map(str, k.shape)) for k in key if isinstance(k, jax.ShapeDtypeStruct)]
    keeping = [KEEPING] * (KEEPING in key)
    return kind or "other", " ".join([kind or str(key[0]), *shapes, *sizes, *keeping])


def compiled(
    programs: Programs,
    key: Any,
    head: ProgramReport,
    lower: Callable[[], jax.stages.Lowered],
    known: dict[bytes, ProgramReport],
) -> ProgramReport:
    """Compile a program and read what it takes; `known` gets it by its text."""
    try:
        lowered = lower()
        text = hashlib.sha256(lowered.as_text().encode()).digest()
        if text in known:
            same = replace(known[text], compile_s=0.0, same_as=known[text].name)
            return replace(same, **_of_head(head))
        started = time.perf_counter()
        executable = lowered.compile()
        took = time.perf_counter() - started
    except Exception as e:  # of whatever kind: that it does not compile is the answer
        return replace(head, error=one_line(e))
    if head.kind == FORWARD:
        learn(programs, key, executable)
        residuals = lowering_of(programs, key).residual_structs(_shape_of(key))
        head = replace(head, handed_bytes=device_bytes(residuals))
    needed, seen = _needed(programs, head, key)
    optimized = executable.as_text() or ""
    cost = hlo_cost(optimized, seen)
    report = replace(
        head,
        compile_s=took,
        needed_flops=needed,
        executed_over_needed=cost.flops / needed if needed else None,
        **_bytes(executable.memory_analysis()),
        pair_arrays=pair_arrays(optimized, _shape_of(key).tokens)
        if head.kind in (FORWARD, BACKWARD, EVALUATE)
        else (),
        **_figures(cost),
    )
    known[text] = report
    return report


def _of_head(head: ProgramReport) -> dict[str, Any]:
    fields = ("name", "segment", "submesh", "kind", "mesh", "keeping")
    return {name: getattr(head, name) for name in fields}


def _shape_of(key: Any) -> Shape:
    """The shape that a segment's task is compiled for."""
    return next(k for k in key if isinstance(k, Shape))


def _needed(programs: Programs, head: ProgramReport, key: Any) -> tuple[float, float]:
    """FLOPs that a program needs, and the share of pairs that its attention sees."""
    if head.kind not in (FORWARD, BACKWARD, EVALUATE):
        return 0.0, 1.0
    segment = lowering_of(programs, key).segment
    shape = _shape_of(key)
    alone = FORWARD not in kinds(programs, head.segment)
    needed = needed_flops(segment, shape, head.kind, with_forward=alone)
    return needed, seen_pairs(segment.module, shape.tokens)


def _bytes(stats: Any) -> dict[str, Any]:
    return {
        "argument_bytes": float(stats.argument_size_in_bytes),
        "output_bytes": float(stats.output_size_in_bytes),
        "aliased_bytes": float(stats.alias_size_in_bytes),
        "temp_bytes": float(stats.temp_size_in_bytes),
    }


def _figures(cost: HloCost) -> dict[str, Any]:
    loops = [f"{cost.unknown_loops} loops of unknown length"] * bool(cost.unknown_loops)
    return {
        "flops": cost.flops,
        "float32_dot_flops": cost.float32_flops,
        "collectives": dict(sorted(cost.collectives.items())),
        "unknown": (*loops, *sorted(cost.unknown_kernels)),
    }


def segment_states(plan: Plan, programs: Programs) -> tuple[SegmentState, ...]:
    """What each segment of a plan holds on a device."""
    in_flight, of = in_flight_limit(plan), resources(programs.layout)
    states = []
    for name, segment in programs.segments.items():
        held = [program_structs(segment)]
        shards: Tree = {}
        if update := programs.updates.get(name):
            held += [grad_structs(segment), update.master_structs, update.state_structs]
            shards = update.shard_structs
        shapes = programs.layout.shapes(segment.plan.module)
        inputs = ((x_structs(segment, shape), field_structs(segment, shape)) for shape in shapes)
        states.append(
            SegmentState(
                segment=name,
                submesh=programs.submesh[name],
                resource=of[programs.submesh[name]],
                state_bytes=device_bytes(held),
                input_bytes=max(map(device_bytes, inputs), default=0.0),
                in_flight=in_flight[name] if name in programs.backward else 1,
                shard_bytes=device_bytes(shards),
                remat=segment.plan.remat,
                zero=segment.plan.zero,
            )
        )
    return tuple(states)


def one_line(error: BaseException) -> str:
    """What an error says, in one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
