"""Compiles every program that a layout needs, ahead of the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from dflop_jax.contract import layer_kinds_of
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Shape
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.programs import LESS_REMAT, Key, Programs, autotunes, program_kinds
from dflop_jax.runtime.segment import Segment, output_struct
from dflop_jax.simulate.task_graph import linked_shapes

CompileJob = Callable[[], jax.stages.Lowered]


def compile_programs(
    programs: Programs,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
    sync: Callable[[], None] = lambda: None,
) -> int:
    """Compile everything that runs on this process, in the order of the plan's segments, which is
    the same on every process; returns how many programs were to be compiled: equal segments on the
    same devices share theirs.

    One of the processes that run a program compiles it. After `sync`, which waits for all
    processes, the others find it in the compilation cache, if there is one: the same binary, so
    that its collectives run in one order everywhere. Where compiling tunes kernels on the devices,
    that is the first of them, so that none tunes while another computes; else they take turns.
    `on_progress` is told before and after each; what it raises leaves out those that are not begun.
    """
    local_jobs = {
        k: job for k, job in compile_jobs(programs).items() if k[0] in programs.local_segments
    }
    representative_of = representatives(programs)
    unique_jobs = {k: job for k, job in local_jobs.items() if representative_of[k[0]] == k[0]}
    process_index = jax.process_index()
    own_keys = {
        k for i, k in enumerate(unique_jobs) if _compiling_process(programs, k, i) == process_index
    }
    own_keys = {k for k in unique_jobs if (_required_forward(programs, k) or k) in own_keys}
    for keys in (own_keys, unique_jobs.keys() - own_keys):
        with ThreadPoolExecutor(threads_for(programs.segments.values())) as pool:
            running: dict[Key, Future[jax.stages.Compiled]] = {}
            try:
                for k in (k for k in unique_jobs if k in keys):
                    on_progress(len(programs.compiled), len(unique_jobs))
                    if forward := _required_forward(programs, k):
                        update_lowering(programs, forward, running[forward].result())
                    running[k] = pool.submit(unique_jobs[k]().compile)
                for key, job in running.items():
                    programs.compiled[key] = job.result()
                    on_progress(len(programs.compiled), len(unique_jobs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        sync()
    for key in local_jobs:
        programs.compiled[key] = programs.compiled[representative_of[key[0]], *key[1:]]
    return len(unique_jobs)


def threads_for(segments: Iterable[Segment]) -> int:
    """How many threads compile programs of these segments. Tracing is serial anyway (it holds the
    GIL); XLA compiles in parallel. Kernels that are timed together would time, or wait for, each
    other."""
    return 1 if autotunes(segments) else 4


def representatives(programs: Programs) -> dict[str, str]:
    """Of every segment the first one whose programs are the same: of layers inside a module that no
    edge touches, the same kinds of them on the same devices."""
    first: dict[Segment, str] = {}
    names = {}
    for name, s in programs.segments.items():
        inside = {*s.stacked} >= {*s.owned_parts} and not s.outgoing and not s.inlets
        kinds, first_layer, n = layer_kinds_of(s.module), s.plan.start, s.plan.n_layers
        # As if it had no name, and held the first layers of its module that are of its kinds.
        start = next(
            i
            for i in range(first_layer + 1)
            if kinds[i : i + n] == kinds[first_layer : first_layer + n]
        )
        canonical = replace(s, plan=replace(s.plan, name="", start=start, stop=start + n))
        names[name] = first.setdefault(canonical, name) if inside else name
    return names


def lowering_of(programs: Programs, key: Key) -> Lowering:
    """The lowering of the segment whose program a key names, under the recompute policy that it
    has."""
    return programs.less_remat[key[0]] if LESS_REMAT in key else programs.lowerings[key[0]]


def update_lowering(programs: Programs, key: Key, compiled: jax.stages.Compiled) -> None:
    """Take from a compiled program what others need to be lowered."""
    lowering = lowering_of(programs, key)
    if key[-1] == FORWARD and lowering.segment.compiles_forward_first:
        lowering.set_residual_shardings(key[1], compiled)


def compile_jobs(programs: Programs) -> dict[Key, CompileJob]:
    """Every program of the plan, those of other processes too, ready to be lowered."""
    found: dict[Key, CompileJob] = {}
    for name, segment in programs.segments.items():
        for shape in programs.layout.shapes(segment.plan.module):
            for kind in program_kinds(programs, name):
                found[name, shape, kind] = partial(programs.lowerings[name].lower, shape, kind)
            if keeping := programs.less_remat.get(name):
                for kind in (FORWARD, BACKWARD):
                    found[name, shape, LESS_REMAT, kind] = partial(keeping.lower, shape, kind)
            for struct in _summed_structs(programs, name, shape):
                # Nothing is donated: what arrived may be the very buffer that was sent.
                add = jax.jit(jnp.add, out_shardings=struct.sharding)
                found[name, "sum", struct] = partial(add.lower, struct, struct)
        for link in programs.outgoing_links[name]:
            for low, high in linked_shapes(programs.layout, link) if link.edge else ():
                exchange = programs.exchange(link, low, high)
                for backward in (False, True) if name in programs.backward else (False,):
                    lower = partial(exchange.lower, backward=backward)
                    found[name, link, low, high, backward] = lower
        if update := programs.updates.get(name):
            found[name, REDUCE] = update.lower_reduce
            found[name, UPDATE] = partial(update.lower_update, len(programs.updates))
    return found


def _required_forward(programs: Programs, key: Key) -> Key | None:
    """The program that has to be compiled before another can be lowered, if any."""
    first = lowering_of(programs, key).segment.compiles_forward_first
    return (*key[:-1], FORWARD) if key[-1] == BACKWARD and first else None


def _compiling_process(programs: Programs, key: Key, i: int) -> int:
    """Which of the processes that run program number `i` compiles it."""
    mesh = programs.segments[key[0]].mesh
    sharing = sorted({d.process_index for d in mesh.devices.flat})
    return sharing[0 if autotunes(programs.segments.values()) else i % len(sharing)]


def _summed_structs(programs: Programs, name: str, shape: Shape) -> list[jax.ShapeDtypeStruct]:
    """What comes to a segment in several parts: an input that several modules, several groups of
    one or several rounds may bring, and the gradient of an output that several edges carry, or one
    to several groups or in rounds."""
    layout, segment = programs.layout, programs.segments[name]
    structs = []
    brought = [k.edge for k in programs.incoming_links[name] if k.edge]
    for field in dict.fromkeys(e.name for e in brought):
        sources = {e.source for e in brought if e.name == field}
        in_rounds = any(layout.data_ranks(m) > 1 for m in sources)
        if len(sources) > 1 or layout.fan_in > 1 or in_rounds:
            structs.append(programs.signature(name, shape).x[field])
    carried = [k.edge for k in programs.outgoing_links[name] if k.edge]
    taps = [e.tap for e in carried]
    for e in carried:
        if segment.data_ranks > 1 or e.target in layout.divided or taps.count(e.tap) > 1:
            structs.append(output_struct(segment, e, shape))
    return list(dict.fromkeys(structs))
