"""Seconds of collectives and sends, by bytes and place: rings inside a node, then between nodes.

Devices are numbered node by node. A group of n devices `stride` apart is what a mesh axis joins:
stride 1 for the axis "model", the degree of tensor parallelism for "data". Across nodes a reduction
is hierarchical, as NCCL's are: scatter inside each node, exchange each device's share over its
own network link, gather inside. What was measured of a link goes before its data sheet.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflop_jax.records import Collective, Hardware

Array = Any  # a whole number, or an array of them; of results floats

# NCCL's cost model (src/graph/tuning.cc): 235 of an A100's 300 GB/s; 8.4 us to start a ring.
# Share of a link's bandwidth that a collective reaches, and seconds to start it, from these.
LINK_REACH = 0.78
START_S = 8.4e-6
# Times that an all-reduce goes around the ring: to scatter the sum, and to gather it.
ALL_REDUCE_PASSES = 2


def group_nodes(n: Array, hardware: Hardware, stride: int = 1) -> tuple[Array, Array]:
    """(devices of a group in a node, nodes) of n devices that are `stride` apart.

    Raises:
      ValueError: n or stride is below 1.
    """
    if np.min(n) < 1 or stride < 1:
        raise ValueError(f"a group needs n >= 1 devices and stride >= 1, got {n} and {stride}")
    inside = np.minimum(n, max(1, hardware.devices_per_node // stride))
    return inside, -(-n // inside)


def reduce_scatter_s(
    n_bytes: float, n: Array, hardware: Hardware, *, stride: int = 1, reach: float = LINK_REACH
) -> Array:
    """Seconds to add up `n_bytes` held by each of n devices and leave 1/n of the sum on each.

    Args:
      n_bytes: of one device's input.
      n: devices of the group, a number or an array; 1 costs nothing.
      stride: distance of neighbours in the numbering of devices.
      reach: share of the links' bandwidth that is reached, by their data sheet.
    """
    return _rings_s("reduce_scatter", n_bytes, n, hardware, stride, reach)


def all_gather_s(
    n_bytes: float, n: Array, hardware: Hardware, *, stride: int = 1, reach: float = LINK_REACH
) -> Array:
    """Seconds until each of n devices has all `n_bytes`, of which each held 1/n: a scattering
    reduction run backwards."""
    return _rings_s("all_gather", n_bytes, n, hardware, stride, reach)


def all_reduce_s(
    n_bytes: float, n: int, hardware: Hardware, *, stride: int = 1, reach: float = LINK_REACH
) -> float:
    """Seconds until each of n devices has the sum of `n_bytes` held by each; see
    `reduce_scatter_s`."""
    return float(_rings_s("all_reduce", n_bytes, n, hardware, stride, reach, ALL_REDUCE_PASSES))


def send_s(
    n_bytes: Array,
    hardware: Hardware,
    *,
    across: bool = False,
    reach: float = LINK_REACH,
    collective: Collective = "send",
) -> Array:
    """Seconds of a copy from one device to another, inside a node or `across` nodes; as the
    collective "ppermute" every device of a ring sends one at once."""
    _, bandwidth, latency_s = _reached(collective, hardware, across=across, reach=reach)
    return np.where(np.equal(n_bytes, 0), 0.0, latency_s + n_bytes / bandwidth)[()]


def _rings_s(
    collective: Collective,
    n_bytes: float,
    n: Array,
    hardware: Hardware,
    stride: int,
    reach: float,
    passes: int = 1,
) -> Array:
    """Seconds of a collective that goes around a ring in each node, then around one of nodes, on
    which each device moves its share."""
    inside, nodes = group_nodes(n, hardware, stride)
    rings = (inside, n_bytes, False), (nodes, n_bytes / inside, True)
    seconds = np.zeros(np.shape(n))
    for size, share, across in rings:
        start_s, bandwidth, latency_s = _reached(collective, hardware, across=across, reach=reach)
        # Each of its steps passes on a part of the bytes.
        step_s = share / size / bandwidth + latency_s
        # A ring that reaches across goes on where the other has started.
        begun = across & (inside > 1)
        seconds = seconds + (size > 1) * (passes * (size - 1) * step_s + start_s * ~begun)
    return np.where(n_bytes == 0, 0.0, seconds)[()]


def _reached(
    collective: Collective, hardware: Hardware, *, across: bool, reach: float
) -> tuple[float, float, float]:
    """(seconds to start, bytes/s, seconds of a step)."""
    if link := hardware.link(collective, across=across):
        return 0.0, link.bandwidth, link.latency_s
    if across:
        return START_S, hardware.network_bandwidth * reach, hardware.network_latency_s
    return START_S, hardware.link_bandwidth * reach, hardware.link_latency_s
