"""Seconds by phase, imbalance and memory of a step: against sums by hand, at size 0 and 1 too."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflop_jax.records import Event, Group, Load, PackedPieces, Schedule, Shape, Trace
from dflop_jax.report.metrics import DEVICE, DEVICE_PEAK, HOST, IDLE
from dflop_jax.train.feed import BatchCounts
from dflop_jax.train.step_figures import (
    max_by_name,
    measure_imbalance,
    measure_memory,
    phase_seconds,
    slowest_processes,
)
from tests.report.runs import make_plan

LAYOUT = make_plan().layout  # "enc" on devices 0 and 1, "llm" on 2 to 7


def trace(*events):
    """A trace of (submesh, direction, start, end)."""
    return Trace(0, "measured", tuple(Event(m, m, 0, d, a, b) for m, d, a, b in events))


def test_phases_are_of_the_mean_device_and_add_up():
    done = trace(
        ("enc", "forward", 0.0, 2.0),
        ("enc → llm", "send", 2.0, 3.0),
        ("llm", "forward", 3.0, 4.0),
        ("llm", "backward", 4.0, 8.0),
        ("enc", "backward", 8.0, 9.0),
    )
    phases = phase_seconds(LAYOUT, done, -3.0, 12.0, {"wait for data": 1.0, "none": 0.0})
    assert phases == {
        "forward": pytest.approx((2 * 2.0 + 6 * 1.0) / 8),
        "backward": pytest.approx((6 * 4.0 + 2 * 1.0) / 8),
        "wait for data": 1.0,
        IDLE: pytest.approx(12 - 10 / 8 - 26 / 8 - 1),
    }
    assert sum(phases.values()) == pytest.approx(12.0)


def test_what_was_done_before_the_step_counts_for_the_one_before():
    done = trace(("enc", "forward", 0.0, 2.0), ("llm", "forward", 0.0, 4.0))
    assert phase_seconds(LAYOUT, done, 1.0, 3.0, {}) == {
        "forward": pytest.approx((2 * 1.0 + 6 * 3.0) / 8),
        IDLE: pytest.approx(0.5),
    }


def test_a_step_of_nothing_is_idle():
    assert phase_seconds(LAYOUT, trace(), 0.0, 0.0, {}) == {IDLE: 0.0}


def group(module, places):
    columns = np.array(places, np.int64).reshape(-1, 4).T
    return Group(module, Shape(8, 64), pieces=PackedPieces(columns), microbatches=2)


@pytest.mark.parametrize("seed", range(4))
def test_imbalance_is_that_of_sums_by_hand(seed):
    rng = np.random.default_rng(seed)
    loads = [Load({"vision": (1, 3), "llm": (int(n),)}) for n in rng.integers(1, 60, 12)]
    ranks = LAYOUT.data_ranks("llm")
    rank = rng.integers(0, ranks, 12)
    halves = [range(7), range(7, 12)]
    groups = tuple(group("llm", [(p, p % 2, rank[p], p % 8) for p in half]) for half in halves)
    most = mean = 0.0
    for half in halves:
        tokens = [sum(loads[p].tokens("llm") for p in half if rank[p] == r) for r in range(ranks)]
        most, mean = most + max(tokens), mean + sum(tokens) / ranks
    uneven = measure_imbalance(LAYOUT, Schedule(0, groups), loads)
    assert uneven == {"vision": 0.0, "llm": pytest.approx(most / mean - 1)}


def test_ranks_with_equal_tokens_are_balanced():
    loads = [Load({"vision": (4,)})] * 2
    even = Schedule(0, (group("vision", [(0, 0, 0, 0), (1, 0, 0, 1)]),))
    n = LAYOUT.data_ranks("vision")
    assert measure_imbalance(LAYOUT, even, loads)["vision"] == n - 1  # all on one rank
    every = Schedule(0, (group("vision", [(r, 0, r, 0) for r in range(n)]),))
    assert measure_imbalance(LAYOUT, every, [Load({"vision": (4,)})] * n)["vision"] == 0.0


def device(stats, process=0):
    return SimpleNamespace(process_index=process, memory_stats=lambda: stats)


def test_memory_is_that_of_the_fullest_device_here():
    held = measure_memory([
        device({"bytes_in_use": 5, "peak_bytes_in_use": 9}),
        device({"bytes_in_use": 7, "peak_bytes_in_use": 8}),
        device({"bytes_in_use": 99}, process=1),
        device(None),
    ])  # fmt: skip
    assert (held[DEVICE], held[DEVICE_PEAK]) == (7.0, 9.0)
    assert held[HOST] > 1e6
    assert set(measure_memory(jax.devices())) <= {HOST, DEVICE, DEVICE_PEAK}
    assert set(measure_memory([])) <= {HOST}


def test_of_several_processes_the_most_counts():
    assert max_by_name([{"a": 1.0}, {"a": 3.0, "b": 2.0}, {}]) == {"a": 3.0, "b": 2.0}
    assert max_by_name([]) == {}


def test_a_row_has_the_slowest_processes_alone():
    assert slowest_processes({}) == {}
    assert [*slowest_processes({p: p % 500 for p in range(999, -1, -1)})] == [
        str(p) for p in (*range(484, 500), *range(984, 1000))
    ]


def test_bad_samples_of_several_processes_are_counted_once():
    ours = BatchCounts([4, 9], {"a": 1}, {}, {}, 2, {"1/0": 3}, {}, {})
    total = BatchCounts.total([ours, replace(ours, bad=[2, 9], max_crossing={"1/0": 5})])
    assert total == BatchCounts([2, 4, 9], {"a": 2}, {}, {}, 4, {"1/0": 5}, {}, {})
