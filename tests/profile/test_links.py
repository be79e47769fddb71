"""Collectives against a ring that is run step by step, inside a node and across nodes; and links
that are timed: what two sizes say of them, and that every collective of the real thing runs."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.profile import links
from dflop_jax.profile.collectives import (
    LINK_EFFICIENCY,
    START_S,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group_overlap,
    overlapped_s,
    reduce_scatter_s,
    send_s,
)
from dflop_jax.profile.links import (
    COLLECTIVES,
    LinkTiming,
    hardware_with_links,
    node_size,
    time_links,
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


@pytest.mark.parametrize("n_bytes", [1.0, 3e9])
def test_a_reduction_is_a_ring_in_each_node_then_of_nodes(n_bytes):
    inside, across = (LINK_EFFICIENCY * b for b in (A100.link_bandwidth, A100.network_bandwidth))
    for n in (1, 2, 3, 8):
        ring = ring_s(n_bytes, n, inside, A100.link_latency_s)
        want = pytest.approx(START_S + ring if n > 1 else 0.0)
        assert reduce_scatter_s(n_bytes, n, A100) == all_gather_s(n_bytes, n, A100) == want
        assert all_reduce_s(n_bytes, n, A100) == pytest.approx((START_S + 2 * ring) * (n > 1))
    within = 2 * ring_s(n_bytes, 8, inside, A100.link_latency_s)
    between = 2 * ring_s(n_bytes / 8, 4, across, A100.network_latency_s)
    assert all_reduce_s(n_bytes, 32, A100) == pytest.approx(START_S + within + between)
    # Of devices 4 apart a node has two, of those 8 apart one.
    between = START_S + ring_s(n_bytes, 4, across, A100.network_latency_s)
    assert all_gather_s(n_bytes, 4, A100, stride=8) == pytest.approx(between)
    within = START_S + ring_s(n_bytes, 2, inside, A100.link_latency_s)
    between = ring_s(n_bytes / 2, 2, across, A100.network_latency_s)
    assert all_gather_s(n_bytes, 4, A100, stride=4) == pytest.approx(within + between)


def test_overlap_hides_a_share_of_the_shorter():
    """1 hides all of it, 0 nothing; links that were not measured hide half."""
    for compute_s, transfer_s in ((3.0, 2.0), (2.0, 3.0), (3.0, 0.0)):
        longer, both = max(compute_s, transfer_s), compute_s + transfer_s
        for overlap in (0.0, 0.3, 1.0):
            want = pytest.approx(overlap * longer + (1 - overlap) * both)
            assert overlapped_s(compute_s, transfer_s, overlap) == want
    node = dataclasses.replace(A100, link_overlap=0.0)  # 8 devices, of which a stride of 4 leaves 2
    assert [group_overlap(n, node, stride=4) for n in (1, 2, 3)] == [0.0, 0.0, 0.5]
    assert group_overlap(9, dataclasses.replace(A100, network_overlap=1.0)) == 1.0


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


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("across", [False, True])
def test_collective_prices_match_their_timings(ranks, across):
    """At both sizes, and between them, for as many devices as were timed."""
    seen = [
        LinkTiming(c, across, ranks, n, 3e-3 + n * 2e-8)
        for c in COLLECTIVES
        for n in (1_000, 50_000)
    ]
    hardware = hardware_with_links("cpu", 1 if across else ranks, seen, {})
    for n in (1_000, 7_000, 50_000):
        want = pytest.approx(3e-3 + n * 2e-8)
        assert send_s(n, hardware, across=across) == want
        for price in (all_reduce_s, reduce_scatter_s, all_gather_s, all_to_all_s):
            assert price(n, ranks, hardware) == want


@pytest.mark.parametrize(
    "platform, processes, hosts, size",
    [
        ("cpu", [0], ["a"], 1),
        ("cpu", [0, 0, 1, 1], ["a", "a"], 2),  # processes share no memory
        ("gpu", [0, 0, 1, 1], ["a", "a"], 4),
        ("gpu", [0, 1, 2], ["a", "a", "b"], 1),  # uneven hosts
    ],
)
def test_node_size_of_processes_and_hosts(platform, processes, hosts, size):
    devices = [SimpleNamespace(platform=platform, process_index=p) for p in processes]
    assert node_size(devices, hosts) == size


def test_every_collective_is_timed_in_and_across_nodes(monkeypatch):
    """Pretended nodes of two devices each, and of one, which nothing joins inside."""
    monkeypatch.setattr(links, "_CPU_BYTES", (64, 4096))
    monkeypatch.setattr(links, "_N_TIMINGS", 1)
    syncs = []
    got = time_links(jax.devices()[:4], 2, lambda: syncs.append(1))
    assert [(t.collective, t.across, t.ranks, t.n_bytes) for t in got] == [
        (c, across, 2, n) for across in (False, True) for c in COLLECTIVES for n in (64, 4096)
    ]
    assert all(t.seconds > 0 for t in got)
    assert len(syncs) == 2 * len(got)  # once to warm up
    assert time_links(jax.devices()[:1], 1, lambda: None) == []
