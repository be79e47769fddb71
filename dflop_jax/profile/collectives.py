"""Seconds of collectives and sends, by bytes and place: rings inside a node, then between nodes.

Devices are numbered node by node. A group of n devices `stride` apart is what a mesh axis joins:
stride 1 for the axis "model", the degree of tensor parallelism for "data". Across nodes a reduction
is hierarchical, as NCCL's are: scatter inside each node, exchange each device's share over its
own network link, gather inside. What was measured of a link goes before its data sheet.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dflop_jax.records import Collective, Hardware

Array = Any  # a whole number, or an array of them; of results floats

# NCCL's cost model (src/graph/tuning.cc): share of a link's bandwidth that a collective reaches,
# 235 of an A100's 300 GB/s, and seconds to start a ring.
LINK_EFFICIENCY = 0.78
START_S = 8.4e-6


def ring_passes(collective: Collective) -> int:
    """Times that a collective goes around a ring: an all-reduce scatters the sum and gathers it."""
    return 2 if collective == "all_reduce" else 1


def ring_s(
    collective: Collective, n_bytes: float, n: Array, hardware: Hardware, *, stride: int = 1
) -> Array:
    """Seconds of a collective of n devices that goes around a ring in each node, then around one of
    nodes, on which each device moves its share: a reduction of which each device keeps 1/n of the
    sum ("reduce_scatter") or all ("all_reduce"), or what gives each all of what each has 1/n of
    ("all_gather").

    Args:
      n_bytes: of one device's input, of a gather's output.
      n: devices of the group, a number or an array; 1 costs nothing.
      stride: distance of neighbours in the numbering of devices.
    """
    inside = np.minimum(n, max(1, hardware.devices_per_node // stride))
    nodes = -(-n // inside)
    rings = (inside, n_bytes, False), (nodes, n_bytes / inside, True)
    seconds = np.zeros(np.shape(n))
    for ring_size, ring_bytes, across in rings:
        start_s, bandwidth, latency_s = _link_rates(collective, hardware, across=across)
        # Each of its steps passes on a part of the bytes.
        step_s = ring_bytes / ring_size / bandwidth + latency_s
        # A ring that reaches across goes on where the other has started.
        inner_ring_started = across & (inside > 1)
        steps = (ring_size - 1) * ring_passes(collective)
        seconds = seconds + (ring_size > 1) * (steps * step_s + start_s * ~inner_ring_started)
    return np.where(n_bytes == 0, 0.0, seconds)[()]


reduce_scatter_s, all_gather_s, all_reduce_s = (
    partial(ring_s, collective) for collective in ("reduce_scatter", "all_gather", "all_reduce")
)


def send_s(
    n_bytes: Array, hardware: Hardware, *, across: bool = False, collective: Collective = "send"
) -> Array:
    """Seconds of a copy from one device to another, inside a node or `across` nodes; as the
    collective "ppermute" every device of a ring sends one at once."""
    _, bandwidth, latency_s = _link_rates(collective, hardware, across=across)
    return np.where(np.equal(n_bytes, 0), 0.0, latency_s + n_bytes / bandwidth)[()]


def _link_rates(
    collective: Collective, hardware: Hardware, *, across: bool
) -> tuple[float, float, float]:
    """(seconds to start, bytes/s, seconds of a step)."""
    if link := hardware.link(collective, across=across):
        return 0.0, link.bandwidth, link.latency_s
    if across:
        return START_S, hardware.network_bandwidth * LINK_EFFICIENCY, hardware.network_latency_s
    return START_S, hardware.link_bandwidth * LINK_EFFICIENCY, hardware.link_latency_s
