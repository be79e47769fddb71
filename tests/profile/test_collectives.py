"""Collectives against a ring that is run step by step, inside a node and across nodes."""

import dataclasses

import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.profile.collectives import (
    START_S,
    all_gather_s,
    all_reduce_s,
    group_nodes,
    reduce_scatter_s,
    send_s,
)
from dflop_jax.records import Link

A100 = find_hardware("a100-80")


def ring_s(n_bytes, n, bandwidth, latency_s):
    """Every device passes a chunk on until each chunk has met all devices."""
    chunks = [{i} for i in range(n)]  # whose terms the chunk on its way to device i holds
    seconds = 0.0
    while any(len(c) < n for c in chunks):
        chunks = [c | {max(c) + 1} for c in chunks]
        seconds += n_bytes / n / bandwidth + latency_s
    return seconds


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("n_bytes", [1.0, 3e9])
def test_inside_a_node_a_reduction_is_a_ring(n, n_bytes):
    ring = ring_s(n_bytes, n, A100.link_bandwidth, A100.link_latency_s)
    want = START_S + ring if n > 1 else 0.0
    assert reduce_scatter_s(n_bytes, n, A100, efficiency=1.0) == pytest.approx(want)
    assert all_gather_s(n_bytes, n, A100, efficiency=1.0) == pytest.approx(want)
    both = START_S + 2 * ring if n > 1 else 0.0
    assert all_reduce_s(n_bytes, n, A100, efficiency=1.0) == pytest.approx(both)


@pytest.mark.parametrize(
    "n, stride, inside, nodes",
    [
        (1, 1, 1, 1),
        (8, 1, 8, 1),
        (16, 1, 8, 2),
        (9, 1, 8, 2),
        (8, 8, 1, 8),
        (4, 4, 2, 2),
        (2, 64, 1, 2),
    ],
)
def test_group_nodes_follow_the_stride(n, stride, inside, nodes):
    assert group_nodes(n, A100, stride) == (inside, nodes)


def test_across_nodes_each_device_reduces_its_share():
    got = all_reduce_s(8e9, 32, A100, efficiency=1.0)
    within = 2 * ring_s(8e9, 8, A100.link_bandwidth, A100.link_latency_s)
    between = 2 * ring_s(1e9, 4, A100.network_bandwidth, A100.network_latency_s)
    assert got == pytest.approx(START_S + within + between)
    # One device per node has the whole to send.
    assert all_reduce_s(8e9, 4, A100, stride=8) > 4 * all_reduce_s(8e9, 8, A100)
    slower = dataclasses.replace(A100, network_bandwidth=A100.network_bandwidth / 2)
    assert all_reduce_s(8e9, 32, slower) > all_reduce_s(8e9, 32, A100)
    assert all_reduce_s(8e9, 8, slower) == all_reduce_s(8e9, 8, A100)


def test_measured_links_replace_the_data_sheet():
    reduced, sent = Link("all_reduce", True, 1e9, 1e-3), Link("send", False, 2e9, 5e-4)
    here = dataclasses.replace(A100, measured=(reduced, sent))
    assert send_s(4e6, here) == pytest.approx(5e-4 + 2e-3)
    assert send_s(4e6, here, across=True) == send_s(4e6, A100, across=True)
    ring = 2 * ring_s(8e6, 4, 1e9, 1e-3)
    assert all_reduce_s(8e6, 4, here, stride=8) == pytest.approx(ring)
    within = all_reduce_s(8e6, 8, A100)
    assert all_reduce_s(8e6, 32, here) == pytest.approx(within + ring / 8 + 6 * 1e-3 * 7 / 8)
    assert all_gather_s(8e6, 32, here) == all_gather_s(8e6, 32, A100)
