"""What a batch moves between ranks, counted by processes that each have some of the ranks."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.data.packing import LocalRanks
from dflop_jax.records import (
    Bucket,
    Edge,
    Group,
    Layout,
    Plan,
    Schedule,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.train import feed
from dflop_jax.train.feed import Packer
from dflop_jax.train.step_figures import max_by_name, sum_by_name

LOW, HIGH = Shape(2, 4), Shape(1, 8)
WIDTH = 3


def plan_of(node):
    """Four data ranks of "a" and of "b" on the same devices."""
    return Plan(
        "test",
        Layout(
            (SubmeshPlan("a", 0, 1, 4, 1), SubmeshPlan("b", 0, 1, 4, 1)),
            tuple(SegmentPlan(m, m, 0, 1, m, True, True) for m in "ab"),
            (Bucket.from_shapes({"a": LOW, "b": HIGH}),),
            edges=(Edge("a", "b", "in"),),
        ),
        Scheduling(node=node),
    )


@pytest.mark.parametrize("node, in_node, across", [(0, 22, 0), (2, 12, 10), (3, 15, 7)])
def test_processes_count_their_own_ranks(node, in_node, across, monkeypatch):
    struct = jax.ShapeDtypeStruct((2, 4, WIDTH), jnp.bfloat16)
    monkeypatch.setattr(feed, "features_struct", lambda *_: struct)
    groups = (Group("a", LOW, (1,)), Group("b", HIGH))
    reads = np.array([[9, 5, 0, 1], [7, 9, 0, 0], [3, 0, 9, 0], [0, 6, 0, 9]])
    parts = []
    for ranks in ({0, 1}, {2, 3}):
        own = np.where(np.isin(np.arange(4), list(ranks)), reads.T, 0)
        packed = [SimpleNamespace(read_counts={}), SimpleNamespace(read_counts={0: own})]
        counts = {"a": ranks, "b": ranks}
        model = SimpleNamespace(modules={"a": None, "b": None})
        packer = Packer(plan_of(node), model, LocalRanks(counts, counts), None, {})
        parts.append(packer._count_traffic(Schedule(0, groups), packed))
    most, here, there = zip(*parts, strict=True)
    assert max_by_name(most) == {"1/0": 7}
    assert sum_by_name(here) == {"a > b": in_node * WIDTH * 2}
    assert sum_by_name(there) == {"a > b": across * WIDTH * 2}
