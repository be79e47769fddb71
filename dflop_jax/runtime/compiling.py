"""Compiles every program of a layout before the first step."""

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


def compile_programs(
    programs: Programs, on_progress: Callable[[int, int], None], sync: Callable[[], None]
) -> int:
    """Compile every program of this process, in the order of the plan's segments, which is the same
    on every process; return the number of programs. Equal segments on equal devices share programs.

    One of the processes that run a program compiles it. After `sync`, which waits for all
    processes, the others read it from the compilation cache, if there is one. All processes then
    have the same binary, so its collectives run in the same order everywhere. If compilation times
    kernels on the devices, the first process compiles all programs, so that no process times
    kernels while another one computes; otherwise processes take turns. `on_progress` is called
    before and after each program; if it raises, the programs that have not started are skipped.
    """
    jobs, process = compile_jobs(programs), jax.process_index()
    local_keys = [k for k in jobs if k[0] in programs.local_segments]
    representative_of = representatives(programs)
    keys = [k for k in local_keys if representative_of[k[0]] == k[0]]
    own_keys = {k for i, k in enumerate(keys) if _compiling_process(programs, k, i) == process}
    own_keys = {k for k in keys if (_required_forward(programs, k) or k) in own_keys}
    for is_own in (True, False):
        with ThreadPoolExecutor(threads_for(programs.segments.values())) as pool:
            running: dict[Key, Future[jax.stages.Compiled]] = {}
            try:
                for k in (k for k in keys if (k in own_keys) == is_own):
                    on_progress(len(programs.compiled), len(keys))
                    if forward := _required_forward(programs, k):
                        update_lowering(programs, forward, running[forward].result())
                    running[k] = pool.submit(jobs[k]().compile)
                for key, job in running.items():
                    programs.compiled[key] = job.result()
                    on_progress(len(programs.compiled), len(keys))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        sync()
    for key in local_keys:
        programs.compiled[key] = programs.compiled[representative_of[key[0]], *key[1:]]
    return len(keys)


def threads_for(segments: Iterable[Segment]) -> int:
    """Return the number of threads that compile programs of these segments. Tracing holds the GIL,
    XLA compiles in parallel; kernels that are timed at the same time would disturb each other."""
    return 1 if autotunes(segments) else 4


def representatives(programs: Programs) -> dict[str, str]:
    """Map every segment to the first one with the same programs: both inside a module, without
    edges, with layers of the same kinds on the same devices."""
    first: dict[Segment, str] = {}
    names = {}
    for name, s in programs.segments.items():
        inside = {*s.stacked} >= {*s.owned_parts} and not s.outgoing and not s.inlets
        kinds, first_layer, n = layer_kinds_of(s.module), s.plan.start, s.plan.n_layers
        # The same segment without its name, moved to the module's first layers of these kinds.
        own_kinds = kinds[first_layer : first_layer + n]
        start = next(i for i in range(first_layer + 1) if kinds[i : i + n] == own_kinds)
        canonical = replace(s, plan=replace(s.plan, name="", start=start, stop=start + n))
        names[name] = first.setdefault(canonical, name) if inside else name
    return names


def lowering_of(programs: Programs, key: Key) -> Lowering:
    """Return the lowering of a key's segment under the key's recompute policy."""
    return programs.less_remat[key[0]] if LESS_REMAT in key else programs.lowerings[key[0]]


def update_lowering(programs: Programs, key: Key, compiled: jax.stages.Compiled) -> None:
    """Read from a compiled program the shardings that other programs need to be lowered."""
    lowering = lowering_of(programs, key)
    if key[-1] == FORWARD and lowering.segment.compiles_forward_first:
        lowering.set_residual_shardings(key[1], compiled)


def compile_jobs(programs: Programs) -> dict[Key, Callable[[], jax.stages.Lowered]]:
    """Return, by key, a function that lowers the program; includes programs of other processes."""
    found: dict[Key, Callable[[], jax.stages.Lowered]] = {}
    for name, segment in programs.segments.items():
        for shape in programs.layout.shapes(segment.plan.module):
            for kind in program_kinds(programs, name):
                found[name, shape, kind] = partial(programs.lowerings[name].lower, shape, kind)
            if lowering := programs.less_remat.get(name):
                for kind in (FORWARD, BACKWARD):
                    found[name, shape, LESS_REMAT, kind] = partial(lowering.lower, shape, kind)
            for struct in _summed_structs(programs, name, shape):
                # Not donated: an array that arrived may share its buffer with the sender's.
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
    """Return the key of the program that must be compiled before this one is lowered, if any."""
    first = lowering_of(programs, key).segment.compiles_forward_first
    return (*key[:-1], FORWARD) if key[-1] == BACKWARD and first else None


def _compiling_process(programs: Programs, key: Key, i: int) -> int:
    """Return the process that compiles program number `i`: one of those that run it."""
    mesh = programs.segments[key[0]].mesh
    sharing = sorted({d.process_index for d in mesh.devices.flat})
    return sharing[0 if autotunes(programs.segments.values()) else i % len(sharing)]


def _summed_structs(programs: Programs, name: str, shape: Shape) -> list[jax.ShapeDtypeStruct]:
    """Return structs of the inputs and output gradients that a segment sums over several terms."""
    layout, segment = programs.layout, programs.segments[name]
    structs = []
    incoming = [k.edge for k in programs.incoming_links[name] if k.edge]
    for field in dict.fromkeys(e.name for e in incoming):
        sources = {e.source for e in incoming if e.name == field}
        in_rounds = any(layout.data_ranks(m) > 1 for m in sources)
        if len(sources) > 1 or layout.fan_in > 1 or in_rounds:
            structs.append(programs.signature(name, shape).x[field])
    outgoing = [k.edge for k in programs.outgoing_links[name] if k.edge]
    taps = [e.tap for e in outgoing]
    for e in outgoing:
        if segment.data_ranks > 1 or e.target in layout.divided or taps.count(e.tap) > 1:
            structs.append(output_struct(segment, e, shape))
    return list(dict.fromkeys(structs))
