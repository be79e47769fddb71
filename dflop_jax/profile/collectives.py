"""Cost model of collectives and sends: rings inside each node, then between nodes.

Devices are numbered node by node. A mesh axis joins groups of n devices `stride` apart: stride 1
for the axis "model", the tensor-parallel degree for "data". Reductions across nodes are
hierarchical, as NCCL's are: scatter inside each node, exchange each device's share over its own
network link, gather inside. Measured links override the data sheet.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dflop_jax.records import Collective, Hardware

Array = Any  # a number or an array: integers as arguments, floats as results

# NCCL's cost model (src/graph/tuning.cc): share of a link's bandwidth that a collective reaches,
# 235 of an A100's 300 GB/s, and seconds to start a ring.
LINK_EFFICIENCY = 0.78
START_S = 8.4e-6


def ring_passes(collective: Collective) -> int:
    """Return how often a collective goes around a ring; an all-reduce is a scatter and a gather."""
    return 2 if collective == "all_reduce" else 1


def overlapped_s(compute_s: Array, transfer_s: Array, overlap: Array) -> Array:
    """Return the seconds of a computation and of a collective beside it in one program.

    `overlap` 1: the longer of the two; 0: their sum; between: their blend, overlap * longer +
    (1 - overlap) * sum.
    """
    # The shorter of the two is hidden but for a share of 1 - overlap.
    return np.maximum(compute_s, transfer_s) + (1.0 - overlap) * np.minimum(compute_s, transfer_s)


def group_overlap(n: Array, hardware: Hardware, *, stride: int = 1) -> Array:
    """Return the overlap factor of the slowest links of n devices `stride` apart."""
    is_across = np.asarray(n) > max(1, hardware.devices_per_node // stride)
    return np.where(is_across, hardware.overlap(across=True), hardware.overlap(across=False))[()]


def ring_s(
    collective: Collective, n_bytes: Array, n: Array, hardware: Hardware, *, stride: int = 1
) -> Array:
    """Return the seconds of a collective of n devices: a ring in each node, then a ring of nodes on
    which each device moves its share. An all-to-all sends all that is for other nodes between them.

    Args:
      collective: "reduce_scatter", "all_reduce", "all_gather" or "all_to_all".
      n_bytes: bytes of one device's input, or of an all-gather's output.
      n: number of devices in the group (number or array); 1 takes no time.
      stride: difference of neighbours' device numbers.
    """
    inside = np.minimum(n, max(1, hardware.devices_per_node // stride))
    nodes = -(-n // inside)
    node_bytes = n_bytes if collective == "all_to_all" else n_bytes / inside
    rings = (inside, n_bytes, False), (nodes, node_bytes, True)
    seconds = np.zeros(np.shape(n))
    for ring_size, ring_bytes, across in rings:
        start_s, bandwidth, latency_s = _link_rates(collective, hardware, across=across)
        # Each step of the ring passes on one part of the bytes.
        step_s = ring_bytes / ring_size / bandwidth + latency_s
        # The ring between nodes follows the inner ring without a second start.
        inner_ring_started = across & (inside > 1)
        steps = (ring_size - 1) * ring_passes(collective)
        seconds = seconds + (ring_size > 1) * (steps * step_s + start_s * ~inner_ring_started)
    return np.where(np.equal(n_bytes, 0), 0.0, seconds)[()]


reduce_scatter_s = partial(ring_s, "reduce_scatter")
all_gather_s = partial(ring_s, "all_gather")
all_reduce_s = partial(ring_s, "all_reduce")
all_to_all_s = partial(ring_s, "all_to_all")


def send_s(
    n_bytes: Array, hardware: Hardware, *, across: bool = False, collective: Collective = "send"
) -> Array:
    """Return the seconds of a copy between two devices, inside a node or `across` nodes. With
    collective "ppermute" all devices of a ring send at once."""
    _, bandwidth, latency_s = _link_rates(collective, hardware, across=across)
    return np.where(np.equal(n_bytes, 0), 0.0, latency_s + n_bytes / bandwidth)[()]


def _link_rates(
    collective: Collective, hardware: Hardware, *, across: bool
) -> tuple[float, float, float]:
    """Return (seconds to start, bytes/s, seconds per step) of a collective on a link."""
    if link := hardware.link(collective, across=across):
        return 0.0, link.bandwidth, link.latency_s
    if across:
        return START_S, hardware.network_bandwidth * LINK_EFFICIENCY, hardware.network_latency_s
    return START_S, hardware.link_bandwidth * LINK_EFFICIENCY, hardware.link_latency_s
