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
from dflop_jax.runtime.programs import KEEPING, Key, Programs, autotunes, kinds
from dflop_jax.runtime.segment import Segment, output_struct
from dflop_jax.simulate.task_graph import linked_shapes

Job = Callable[[], jax.stages.Lowered]


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
    every = {k: job for k, job in jobs(programs).items() if k[0] in programs.local}
    alike = first_alike(programs)
    todo = {k: job for k, job in every.items() if alike[k[0]] == k[0]}
    here = jax.process_index()
    mine = {k for i, k in enumerate(todo) if _compiled_by(programs, k, i) == here}
    mine = {k for k in todo if (_forward_of(programs, k) or k) in mine}
    for keys in (mine, todo.keys() - mine):
        with ThreadPoolExecutor(threads_for(programs.segments.values())) as pool:
            running: dict[Key, Future[jax.stages.Compiled]] = {}
            try:
                for k in (k for k in todo if k in keys):
                    on_progress(len(programs.compiled), len(todo))
                    if forward := _forward_of(programs, k):
                        learn(programs, forward, running[forward].result())
                    running[k] = pool.submit(todo[k]().compile)
                for key, job in running.items():
                    programs.compiled[key] = job.result()
                    on_progress(len(programs.compiled), len(todo))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        sync()
    for key in every:
        programs.compiled[key] = programs.compiled[alike[key[0]], *key[1:]]
    return len(todo)


def threads_for(segments: Iterable[Segment]) -> int:
    """How many threads compile programs of these segments. Tracing is serial anyway (it holds the
    GIL); XLA compiles in parallel. Kernels that are timed together would time, or wait for, each
    other."""
    return 1 if autotunes(segments) else 4


def first_alike(programs: Programs) -> dict[str, str]:
    """Of every segment the first one whose programs are the same: of layers inside a module that no
    edge touches, the same kinds of them on the same devices."""
    first: dict[Segment, str] = {}
    names = {}
    for name, s in programs.segments.items():
        inside = {*s.stacked} >= {*s.own_parts} and not s.outgoing and not s.inlets
        kinds, here, n = layer_kinds_of(s.module), s.plan.start, s.plan.n_layers
        # As if it had no name, and held the first layers of its module that are of its kinds.
        start = next(i for i in range(here + 1) if kinds[i : i + n] == kinds[here : here + n])
        alike = replace(s, plan=replace(s.plan, name="", start=start, stop=start + n))
        names[name] = first.setdefault(alike, name) if inside else name
    return names


def lowering_of(programs: Programs, key: Key) -> Lowering:
    """The lowering of the segment whose program a key names, under the recompute policy that it
    has."""
    return programs.keeping[key[0]] if KEEPING in key else programs.lowerings[key[0]]


def learn(programs: Programs, key: Key, compiled: jax.stages.Compiled) -> None:
    """Take from a compiled program what others need to be lowered."""
    lowering = lowering_of(programs, key)
    if key[-1] == FORWARD and lowering.segment.compiles_forward_first:
        lowering.learn_residuals(key[1], compiled)


def jobs(programs: Programs) -> dict[Key, Job]:
    """Every program of the plan, those of other processes too, ready to be lowered."""
    jobs: dict[Key, Job] = {}
    for name, segment in programs.segments.items():
        for shape in programs.layout.shapes(segment.plan.module):
            for kind in kinds(programs, name):
                jobs[name, shape, kind] = partial(programs.lowerings[name].lower, shape, kind)
            if keeping := programs.keeping.get(name):
                for kind in (FORWARD, BACKWARD):
                    jobs[name, shape, KEEPING, kind] = partial(keeping.lower, shape, kind)
            for struct in _summed(programs, name, shape):
                # Nothing is donated: what arrived may be the very buffer that was sent.
                add = jax.jit(jnp.add, out_shardings=struct.sharding)
                jobs[name, "sum", struct] = partial(add.lower, struct, struct)
        for link in programs.out_of[name]:
            for low, high in linked_shapes(programs.layout, link) if link.edge else ():
                exchange = programs.exchange(link, low, high)
                for backward in (False, True) if name in programs.backward else (False,):
                    lower = partial(exchange.lower, backward=backward)
                    jobs[name, link, low, high, backward] = lower
        if update := programs.updates.get(name):
            jobs[name, REDUCE] = update.lower_reduce
            jobs[name, UPDATE] = partial(update.lower_update, len(programs.updates))
    return jobs


def _forward_of(programs: Programs, key: Key) -> Key | None:
    """The program that has to be compiled before another can be lowered, if any."""
    first = lowering_of(programs, key).segment.compiles_forward_first
    return (*key[:-1], FORWARD) if key[-1] == BACKWARD and first else None


def _compiled_by(programs: Programs, key: Key, i: int) -> int:
    """Which of the processes that run program number `i` compiles it."""
    mesh = programs.segments[key[0]].mesh
    sharing = sorted({d.process_index for d in mesh.devices.flat})
    return sharing[0 if autotunes(programs.segments.values()) else i % len(sharing)]


def _summed(programs: Programs, name: str, shape: Shape) -> list[jax.ShapeDtypeStruct]:
    """What comes to a segment in several parts: an input that several modules, several groups of
    one or several rounds may bring, and the gradient of an output that several edges carry, or one
    to several groups or in rounds."""
    layout, segment = programs.layout, programs.segments[name]
    structs = []
    brought = [k.edge for k in programs.into[name] if k.edge]
    for field in dict.fromkeys(e.name for e in brought):
        sources = {e.source for e in brought if e.name == field}
        in_rounds = any(layout.data_ranks(m) > 1 for m in sources)
        if len(sources) > 1 or layout.fan_in > 1 or in_rounds:
            structs.append(programs.signature(name, shape).x[field])
    carried = [k.edge for k in programs.out_of[name] if k.edge]
    taps = [e.tap for e in carried]
    for e in carried:
        if segment.data_ranks > 1 or e.target in layout.divided or taps.count(e.tap) > 1:
            structs.append(output_struct(segment, e, shape))
    return list(dict.fromkeys(structs))
