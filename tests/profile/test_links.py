"""Links that are timed: what two sizes say of them, and that every collective of the real thing
runs."""

from types import SimpleNamespace

import jax
import pytest

from dflop_jax.profile import links
from dflop_jax.profile.collectives import all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from dflop_jax.profile.links import (
    COLLECTIVES,
    LinkTiming,
    hardware_with_links,
    max_over_processes,
    node_size,
    time_links,
)

PRICES = (all_reduce_s, reduce_scatter_s, all_gather_s)


def timings(ranks, *, across, start_s, byte_s):
    return [
        LinkTiming(c, across, ranks, n, start_s + n * byte_s)
        for c in COLLECTIVES
        for n in (1_000, 50_000)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("across", [False, True])
def test_collective_prices_match_their_timings(ranks, across):
    """At both sizes, and between them, for as many devices as were timed."""
    seen = timings(ranks, across=across, start_s=3e-3, byte_s=2e-8)
    hardware = hardware_with_links("cpu", 1 if across else ranks, seen)
    for n in (1_000, 7_000, 50_000):
        want = pytest.approx(3e-3 + n * 2e-8)
        assert send_s(n, hardware, across=across) == want
        for price in PRICES:
            assert price(n, ranks, hardware) == want


def devices(platform, *processes):
    return [SimpleNamespace(platform=platform, process_index=p) for p in processes]


@pytest.mark.parametrize(
    "platform, processes, hosts, size",
    [
        ("cpu", [0], ["a"], 1),
        ("cpu", [0, 0, 1, 1], ["a", "a"], 2),  # processes share no memory
        ("gpu", [0, 0, 1, 1], ["a", "a"], 4),
        ("gpu", [0, 1, 2, 3], ["a", "a", "b", "b"], 2),
        ("gpu", [0, 1, 2], ["a", "a", "b"], 1),  # uneven hosts
    ],
)
def test_node_size_of_processes_and_hosts(platform, processes, hosts, size):
    assert node_size(devices(platform, *processes), hosts) == size


def test_longest_timing_over_processes_is_taken():
    one, other = (
        [LinkTiming("send", True, 2, n, seconds) for n in (1, 2)] for seconds in (0.0, 1.0)
    )
    assert max_over_processes([one, other]) == max_over_processes([other, one]) == other
    assert max_over_processes([[], []]) == []


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
