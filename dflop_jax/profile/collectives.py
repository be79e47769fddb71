"""Seconds of collectives and sends, by bytes and place: rings inside a node, then between nodes.

Devices are numbered node by node. A group of n devices `stride` apart is what a mesh axis joins:
stride 1 for the axis "model", the degree of tensor parallelism for "data". Across nodes a reduction
is hierarchical, as NCCL's are: scatter inside each node, exchange each device's share over its
own network link, gather inside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflop_jax.hardware import Hardware

Array = Any  # a whole number, or an array of them; of results floats

# NCCL's cost model (src/graph/tuning.cc): 235 of an A100's 300 GB/s; 8.4 us to start a ring.
# Share of a link's bandwidth that a collective reaches, and seconds to start it, from these.
LINK_REACH = 0.78
START_S = 8.4e-6


def _ring_s(n_bytes: Array, n: Array, bandwidth: float, latency_s: float, reach: float) -> Array:
    """n - 1 steps of a ring, each passing on 1/n of the bytes."""
    return (n - 1) * (n_bytes / n / (bandwidth * reach) + latency_s)


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
      reach: share of the links' bandwidth that is reached.
    """
    inside, nodes = group_nodes(n, hardware, stride)
    h = hardware
    within = _ring_s(n_bytes, inside, h.link_bandwidth, h.link_latency_s, reach)
    between = _ring_s(n_bytes / inside, nodes, h.network_bandwidth, h.network_latency_s, reach)
    return np.where((np.asarray(n) == 1) | (n_bytes == 0), 0.0, START_S + within + between)[()]


def all_gather_s(
    n_bytes: float, n: Array, hardware: Hardware, *, stride: int = 1, reach: float = LINK_REACH
) -> Array:
    """Seconds until each of n devices has all `n_bytes`, of which each held 1/n: a scattering
    reduction run backwards."""
    return reduce_scatter_s(n_bytes, n, hardware, stride=stride, reach=reach)


def all_reduce_s(
    n_bytes: float, n: int, hardware: Hardware, *, stride: int = 1, reach: float = LINK_REACH
) -> float:
    """Seconds until each of n devices has the sum of `n_bytes` held by each; see
    `reduce_scatter_s`."""
    half = reduce_scatter_s(n_bytes, n, hardware, stride=stride, reach=reach)
    return max(0.0, 2 * half - START_S)


def send_s(
    n_bytes: float, hardware: Hardware, *, across: bool = False, reach: float = LINK_REACH
) -> float:
    """Seconds of a copy from one device to another, inside a node or `across` nodes."""
    if n_bytes == 0:
        return 0.0
    if across:
        return hardware.network_latency_s + n_bytes / (hardware.network_bandwidth * reach)
    return hardware.link_latency_s + n_bytes / (hardware.link_bandwidth * reach)
