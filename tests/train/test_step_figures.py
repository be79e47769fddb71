"""Figures and losses of a step and of a run against sums by hand."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.config import Config, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.data.packing import LocalRanks
from dflop_jax.records import (
    Bucket,
    DataProfile,
    Edge,
    Event,
    Group,
    Layout,
    Load,
    PackedPieces,
    Plan,
    Predicted,
    Schedule,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    Trace,
)
from dflop_jax.report.metrics import IDLE
from dflop_jax.train import feed, step_figures
from dflop_jax.train.feed import BatchCounts, BatchLoss, Packer
from dflop_jax.train.run_context import make_run_context
from dflop_jax.train.step_figures import (
    PredictedRun,
    max_by_name,
    measure_imbalance,
    phase_seconds,
    predict_run,
    sum_by_name,
)
from tests.plans import NANO
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


def test_counts_of_several_processes_add_up_and_bad_samples_count_once():
    ours = BatchCounts([4, 9], {"a": 1}, {"a": 4.0}, {"a": 1.5}, 2, {"1/0": 3}, {}, {})
    total = BatchCounts.total([ours, replace(ours, bad=[2, 9], max_requested={"1/0": 5})])
    assert total == BatchCounts([2, 4, 9], {"a": 2}, {"a": 8.0}, {"a": 3.0}, 4, {"1/0": 5}, {}, {})


def module(*fields, **more):
    return SimpleNamespace(inputs={"entry": ("tokens",), "exit": fields}, **more)


MODEL = SimpleNamespace(
    modules={
        "eye": module("grid"),
        "text": module("targets", "weights"),
        "generator": module("weights", loss_weight=0.25),
    }
)


def test_every_module_has_a_denominator_of_its_own():
    loss = BatchLoss.for_model(MODEL, {"text": 30.0, "generator": 2.5})
    sums = {"text.loss_sum": 60.0, "text.correct": 15.0, "generator.loss_sum": 20.0}
    assert loss.means(sums) == {"text": 2.0, "generator": 8.0}
    assert loss.total(sums) == 2.0 + 0.25 * 8.0
    assert loss.scales == {"text": 1 / 30, "generator": 0.25 / 2.5}
    # What the scales make of the tokens' losses is the loss.
    total = sum(scale * sums[f"{m}.loss_sum"] for m, scale in loss.scales.items())
    assert total == pytest.approx(loss.total(sums))
    assert loss.means(sums, "correct") == {"text": 0.5, "generator": 0.0}
    assert loss.is_supervised


def test_a_batch_without_a_supervised_token_divides_by_one():
    loss = BatchLoss.for_model(MODEL, {"text": 0.0, "generator": 0.0})
    assert loss.scales == {"text": 1.0, "generator": 0.25}
    assert loss.total({}) == 0.0
    assert not loss.is_supervised
    assert BatchLoss.for_model(MODEL, {"text": 0.0, "generator": 0.1}).is_supervised


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


@pytest.mark.parametrize(
    "hardware, stated, peak",
    [("a100-80", 0.0, 312e12), ("a100-80", 1e12, 1e12), ("cpu", 0.0, 0.0), ("cpu", 1e9, 1e9)],
)
def test_a_plan_promises_the_time_of_a_run_and_its_rates(monkeypatch, hardware, stated, peak):
    """Batches of 4 of two samples of 10 and 30 tokens, a second each: 80 tokens/s; a vision token
    needs 2e12 FLOPs, one of text 1e12: 4 x (5 x 2 + 20) = 120 TFLOP a step."""
    config = Config(
        model=ModelConfig(size="nano", dtype="bfloat16"),
        plan=PlanConfig(policy="dflop", hardware=hardware, devices=2),
        train=TrainConfig(epochs=2, global_batch=4, peak_flops=stated),
    )
    flops = {"vision": lambda n, _: 2e12 * n, "llm": lambda n, _: 1e12 * n}
    monkeypatch.setattr(step_figures, "needed_flops", lambda *_: flops)
    plan = dataclasses.replace(NANO, predicted=Predicted(makespan_s=1.0))
    loads = Load({"vision": (10,), "llm": (10,)}), Load({"llm": (10, 20)})
    got = predict_run(make_run_context(config), DataProfile("two", 10, loads), plan)
    assert got == PredictedRun(5, 5.0, 80.0, got.mfu, got.mfu_by_module)
    assert got.mfu == (pytest.approx(120e12 / (2 * peak)) if peak else None)
    by_module = {"vision": 40e12 / peak, "llm": 80e12 / peak} if peak else {}
    assert got.mfu_by_module == pytest.approx(by_module)  # NANO has each on a device of its own
