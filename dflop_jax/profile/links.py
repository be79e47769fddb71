"""Measurement of collectives and sends within a node and between nodes.

Each is timed at two sizes, which give its latency and bandwidth. All nodes run the same collective
at the same time, as data ranks do, so that devices share the network as in a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.hardware import hardware_of_kind
from dflop_jax.profile.collectives import ring_passes
from dflop_jax.records import Collective, Hardware, Link
from dflop_jax.runtime.communicator import is_local, send, zeros
from dflop_jax.runtime.layout import can_form_submesh

Sync = Callable[[], None]
Timing = TypeVar("Timing", bound=Any)
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
# Timed sizes in bytes. The larger takes many times a collective's start-up (about 1 ms on CPUs);
# doubling it doubles the measuring time.
_CPU_BYTES, _GPU_BYTES = (1 << 16, 1 << 21), (1 << 20, 1 << 26)
# Number of calls in a row without waiting, as in a step, and number of such timings; doubling
# either doubles the measuring time.
_CALLS_PER_TIMING, _N_TIMINGS = 4, 3


@dataclass(frozen=True)
class LinkTiming:
    """Time of a collective of `n_bytes` (see `collectives.ring_s`) over `ranks` devices: all in one
    node, or on different nodes (`across`)."""

    collective: Collective
    across: bool
    ranks: int
    n_bytes: int
    seconds: float


def node_size(devices: Sequence[jax.Device], hosts: Sequence[str]) -> int:
    """Return the number of devices per node (on CPUs: per process, whose devices share memory); 1
    if nodes have different numbers. `hosts`: the host name of each process."""
    cpu = devices[0].platform == "cpu"
    nodes = Counter(d.process_index if cpu else hosts[d.process_index] for d in devices)
    sizes = set(nodes.values())
    return sizes.pop() if len(sizes) == 1 else 1


def time_links(devices: Sequence[jax.Device], node: int, sync: Sync) -> list[LinkTiming]:
    """Time all collectives; all processes call this. Timings of collectives without devices of this
    process are near 0 s. `node`: devices per node; `sync` waits for the other processes."""
    blocks = node_blocks(devices, node)
    sizes = _CPU_BYTES if devices[0].platform == "cpu" else _GPU_BYTES
    timings: list[LinkTiming] = []
    for across in (False, True):
        ranks = len(blocks) if across else node
        for collective, n_bytes in product(COLLECTIVES if ranks > 1 else (), sizes):
            seconds = median_call_s(_collective_calls(collective, across, blocks, n_bytes), sync)
            timings.append(LinkTiming(collective, across, ranks, n_bytes, seconds))
    return timings


def node_blocks(devices: Sequence[jax.Device], node: int) -> list[list[jax.Device]]:
    """Return the devices of each node of `node` devices."""
    return [list(devices[i : i + node]) for i in range(0, len(devices), node)]


def max_over_processes(process_timings: Sequence[Sequence[Timing]]) -> list[Timing]:
    """Return the maximum over processes of each timing."""
    return [
        replace(timings[0], seconds=max(t.seconds for t in timings))
        for timings in zip(*process_timings, strict=True)
    ]


def hardware_with_links(
    kind: str, node: int, timings: Sequence[LinkTiming], overlaps: Mapping[bool, float]
) -> Hardware:
    """Return the data sheet of a kind of device with measured links and devices per node;
    `overlaps`: measured overlap factors of links across nodes (True) and inside one."""
    by_link: dict[tuple[Collective, bool], list[LinkTiming]] = {}
    for t in timings:
        by_link.setdefault((t.collective, t.across), []).append(t)
    measured = tuple(_fit_link(small, large) for small, large in by_link.values())
    return replace(
        hardware_of_kind(kind),
        devices_per_node=node,
        measured=measured,
        link_overlap=overlaps.get(False),
        network_overlap=overlaps.get(True),
    )


def _fit_link(small: LinkTiming, large: LinkTiming) -> Link:
    """Return a link's bandwidth and latency per ring step, from timings at two sizes."""
    steps, chunk = 1, 1
    if small.collective not in ("send", "ppermute"):
        chunk, steps = small.ranks, (small.ranks - 1) * ring_passes(small.collective)
    byte_s = max(0.0, large.seconds - small.seconds) / (large.n_bytes - small.n_bytes)
    latency_s = max(0.0, small.seconds - byte_s * small.n_bytes)
    # If noise hides the difference, the whole time of the larger size counts as bandwidth.
    byte_s = byte_s or large.seconds / large.n_bytes
    return Link(small.collective, small.across, steps / chunk / byte_s, latency_s / steps)


Call = Callable[[], jax.Array]


def _collective_calls(
    collective: Collective, across: bool, blocks: Sequence[Sequence[jax.Device]], n_bytes: int
) -> list[Call]:
    """Return this process's calls: one per group of devices that run the collective at once."""
    n_items = n_bytes // np.dtype(np.float32).itemsize  # gradients are float32
    if collective == "send":
        pairs = [(blocks[0][0], blocks[1][0])] if across else [(b[0], b[1]) for b in blocks]
        shardings = [[SingleDeviceSharding(d) for d in pair] for pair in pairs]
        return [
            partial(send, zeros(jax.ShapeDtypeStruct((n_items,), jnp.float32, sharding=a)), b)
            for a, b in shardings
        ]
    return [collective_call(collective, m, n_items) for m in local_meshes(blocks, across)]


def local_meshes(blocks: Sequence[Sequence[jax.Device]], across: bool) -> list[Mesh]:
    """Return this process's meshes ("node", "rank"): ranks are the devices of a node, or, `across`
    nodes, one device of each."""
    if not across:
        meshes = [Mesh(np.array([block]), ("node", "rank")) for block in blocks]
    else:
        every = [d for block in blocks for d in block]
        joined = blocks if can_form_submesh(every) else [block[:1] for block in blocks]
        meshes = [Mesh(np.array(joined).T, ("node", "rank"))]
    return list(filter(is_local, meshes))


def collective_call(collective: Collective, mesh: Mesh, n_items: int) -> Call:
    """Compile a collective over the axis "rank" of a mesh ("node", "rank") and return a call on
    zeros: at least `n_items` float32 of a device's input, or of an all-gather's output."""
    ranks = mesh.shape["rank"]
    items_per_rank = -(-n_items // ranks)
    n_items = items_per_rank * (1 if collective == "all_gather" else ranks)

    def body(x: jax.Array) -> jax.Array:
        x = x.reshape(-1)
        if collective == "all_reduce":
            y = lax.psum(x, "rank")
        elif collective == "reduce_scatter":
            y = lax.psum_scatter(x, "rank", tiled=True)
        elif collective == "all_gather":
            y = lax.all_gather(x, "rank", tiled=True)
        elif collective == "all_to_all":
            y = lax.all_to_all(x, "rank", 0, 0, tiled=True)
        else:
            y = lax.ppermute(x, "rank", [(i, (i + 1) % ranks) for i in range(ranks)])
        return y.reshape(1, 1, -1)

    spec = P("node", "rank")
    struct = jax.ShapeDtypeStruct(
        (*mesh.devices.shape, n_items), jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped).lower(struct).compile()
    return partial(program, zeros(struct))


def median_call_s(calls: Sequence[Call], sync: Sync) -> float:
    """Return the median seconds per call of several calls in a row, after a warm-up."""

    def run(n: int) -> float:
        sync()
        begun_s = time.perf_counter()
        jax.block_until_ready([call() for _ in range(n) for call in calls])
        return (time.perf_counter() - begun_s) / n

    run(1)
    return median(run(_CALLS_PER_TIMING) for _ in range(_N_TIMINGS))
