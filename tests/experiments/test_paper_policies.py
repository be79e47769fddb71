"""The papers' results from end to end on a small model."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflop_jax.records import Load
from experiments.paper import dflop, dip, feature_exchange, headlines, orch, report, results, setups
from experiments.paper.cases import (
    SEEDS,
    Case,
    Untuned,
    evaluation_batches,
    profile_data,
    tuning_batches,
)
from experiments.paper.evaluation import DFLOP, MEGATRON, PUBLISHED, evaluate, mean_step_s
from experiments.paper.headlines import Headline
from experiments.paper.tuning import REMATS
from models import omni


@dataclass(frozen=True)
class Model:
    def __call__(self):
        return omni.build("omni-nano", "bfloat16")


@dataclass(frozen=True)
class Drawn:
    def __call__(self, n, seed):
        rng, size = np.random.default_rng(seed), Model()().piece_tokens
        drawn = rng.integers((0, 0, 64), (4, 2, 512), (n, 3)).tolist()
        vision, audio = size["vision"], size["audio"]
        return [Load({"vision": (vision,) * v, "audio": (audio,) * a, "llm": (t,)})
                for v, a, t in drawn]  # fmt: skip


@dataclass(frozen=True)
class Poisoned(Drawn):
    """The same samples, but evaluation batches have two that exceed all others."""

    def __call__(self, n, seed):
        loads = super().__call__(n, seed)
        if SEEDS["evaluation"] <= seed < SEEDS["tuning"]:
            loads[0] = loads[3] = Load({"llm": (8192,)})
        return loads


TINY = Case("VLM-tiny", Model(), Drawn(), 4, 16, untuned=Untuned((2,), REMATS))
CLUSTER = Case("tiny + nano", Model(), Drawn(), 8, 32, setups.CLUSTER)
pytestmark = pytest.mark.usefixtures("small_profiles")


def test_the_planner_sees_no_evaluated_sample():
    poisoned = replace(TINY, draw_loads=Poisoned())
    assert evaluation_batches(poisoned) != evaluation_batches(TINY)
    assert profile_data(poisoned) == profile_data(TINY)
    assert tuning_batches(poisoned) == tuning_batches(TINY)
    with_poison, without = evaluate(poisoned, "orch"), evaluate(TINY, "orch")
    assert with_poison.plan == without.plan
    assert (with_poison.n_replaced, without.n_replaced) == (2 * TINY.batches, 0)
    for i, (step, clean) in enumerate(zip(with_poison.steps, without.steps, strict=True)):
        others = Drawn()(TINY.global_batch, SEEDS["replacement"] + i)
        want = [others[0], *clean.loads[1:3], others[1], *clean.loads[4:]]
        assert list(step.loads) == want


def test_draws_of_different_use_share_no_seed():
    seeds = {name: set() for name in SEEDS}

    def draw(n, seed):
        seeds[max((s, name) for name, s in SEEDS.items() if s <= seed)[1]].add(seed)
        return Drawn()(n, seed)

    case = replace(TINY, draw_loads=draw, batches=16)  # as many as benchmarks evaluate
    for use in (profile_data, evaluation_batches, tuning_batches):
        use(case)
    assert seeds["profile"] == {0}
    assert seeds["evaluation"] == {*range(1, 17)}
    assert len(seeds["tuning"]) == 2
    assert not seeds["replacement"]


def test_headlines_name_the_input_that_reproduces_them():
    headline = Headline("DFLOP", "throughput", (1.2, 3.6))
    found = {("a", "untuned"): 3.5, ("a", "tuned"): 1.0, ("b", "untuned"): 2.0, ("b", "tuned"): 1.1}
    assert headlines.describe_interval(headline, found) == (
        "untuned 2.00x to 3.50x; tuned 1.00x to 1.10x"
    )
    assert headlines.describe_reproduction(headline, found) == (
        "1.20x: none; nearest 1.10x (b, tuned); 3.60x: 3.50x (a, untuned)"
    )
    assert headlines.describe_reproduction(headline, {}) == "no plan fits"
    for paper in headlines.PAPERS.values():  # one input of a set-up is changed at a time
        bases = [case for label, case in paper.points.items() if label == case.name]
        for label, case in paper.points.items():
            fields = ("model", "draw_loads", "global_batch", "n_devices", "hardware", "untuned")
            changes = [sum(getattr(b, f) != getattr(case, f) for f in fields) for b in bases]
            assert min(changes) == (label != case.name), label


@pytest.mark.slow
def test_dip_beside_its_baseline_and_part_by_part():
    evaluation = dip.compare_throughput([TINY])
    untuned, base, best = (evaluate(TINY, s) for s in (PUBLISHED, MEGATRON, "dip"))
    assert untuned.fits, untuned.description
    assert untuned.step_s >= base.step_s
    assert base.fits, base.description
    assert best.fits, best.description
    assert 0 <= best.idle_share < 1
    assert evaluation.bars["+ memory"] == [pytest.approx(best.step_s / base.step_s)]
    gains = [f"{100 * (a.step_s / best.step_s - 1):+.0f}%" for a in (untuned, base)]
    assert evaluation.rows[0][-1].startswith(", ".join(gains))
    (first, *_), parts = best.plan.layout.buckets, max(2, best.plan.layout.fan_in)
    divided = best.plan.with_layout(buckets=(first,), fan_in=parts)  # parts have one shape
    whole = dip.merge_groups(TINY, divided)
    assert whole.layout.fan_in == 1
    assert {m: s.tokens for b in whole.layout.buckets for m, s in b.shapes} == {
        m: s.tokens for b in divided.layout.buckets for m, s in b.shapes
    }
    plain = dip.simulate_1f1b(TINY, best.plan, best.steps)
    assert [s.schedule.groups for s in plain] == [s.schedule.groups for s in best.steps]
    assert mean_step_s(best.steps) <= mean_step_s(plain) * (1 + 1e-9)


def test_exchange_against_a_loop_over_pieces():
    evaluation = evaluate(TINY, "orch")
    plan, step = evaluation.plan, evaluation.steps[0]
    loads = step.loads
    assert loads == evaluation_batches(TINY)[0]
    hardware = replace(TINY.hardware, devices_per_node=2)
    case = replace(TINY, hardware=hardware)
    traffic = feature_exchange.measure_exchange(case, step, is_permuted=True)
    in_node = across_nodes = total = 0.0
    groups = step.schedule.groups
    for source in groups:
        for target in (groups[f] for f in source.feeds):
            low, high = plan.layout.data_ranks(source.module), plan.layout.data_ranks(target.module)
            size = feature_exchange._bytes_per_token(case, source.module)
            where = placed(source, loads)
            read = placed(target, loads)
            device = plan.layout.devices(source.module)
            for sample, rank, tokens in where:
                for at in {r for s, r, _ in read if s == sample}:
                    total += size * tokens
                    home = at // (high // np.gcd(low, high)) * (low // np.gcd(low, high))
                    if home != rank:
                        far = device[home] // 2 != device[rank] // 2
                        across_nodes += size * tokens * far
                        in_node += size * tokens * (not far)
    assert (traffic.in_node_bytes, traffic.across_node_bytes) == (
        pytest.approx(in_node),
        pytest.approx(across_nodes),
    )
    assert feature_exchange.count_feature_bytes(case, step) == pytest.approx(total)
    n_home_nodes, n_nodes = feature_exchange.count_home_nodes(case, plan)
    assert 1 <= n_home_nodes <= n_nodes <= 2
    assert traffic.seconds >= 2 * across_nodes / 4 / hardware.network_bandwidth
    random_traffic = feature_exchange.measure_exchange(case, step, is_permuted=False)
    assert random_traffic.across_node_bytes >= 0
    (row,) = orch.compare_node_traffic([TINY]).rows
    assert row[0] == TINY.name
    row, _ = orch.compare_throughput([TINY]).rows
    assert row[4] == f"{evaluate(TINY, 'megatron').step_s / evaluation.step_s:.2f}x"


def placed(group, loads):
    """(sample, rank, tokens) of every piece of a group."""
    numbered = [(s, n) for s, load in enumerate(loads) for n in load.lengths(group.module)]
    return [
        (numbered[piece][0], rank, numbered[piece][1])
        for piece, _, rank, _ in group.pieces.columns.T.tolist()
    ]


@pytest.mark.slow
def test_an_experiment_runs_and_is_reported(tmp_path, capsys):
    result = dflop.compare_nodes(CLUSTER, nodes=(1,))
    assert [row[:2] for row in result.rows] == [["1", "256"], ["1", "32"]]
    for batch in (256, 32):
        case = dflop.resize_case(CLUSTER, 1, batch)
        evaluations = m, d = [evaluate(case, s) for s in (MEGATRON, DFLOP)]  # cached
        assert all(0 <= a.idle_share < 1 and a.idle_device_s >= 0 for a in evaluations)
        assert all(len(a.steps) == case.batches for a in evaluations)
        row = next(row for row in result.rows if row[1] == str(batch))
        assert row[2:4] == [f"{batch / a.step_s:.2f}" for a in evaluations]
        assert row[4:] == [f"{m.step_s / d.step_s:.2f}x"]
    results.print_result(result)
    assert "the gap widens with nodes" in capsys.readouterr().out
    report.draw_bars(result, tmp_path / "scaling.png")
    page = report.write_timelines(CLUSTER, tmp_path)
    text = report.write_report([result], tmp_path, page, 1.0).read_text(encoding="utf-8")
    for row in result.rows:
        assert "| " + " | ".join(row) + " |" in text
    assert "![" + result.title + "](scaling.png)" in text
    assert "CC BY 4.0" in text
    assert (tmp_path / "scaling.png").stat().st_size > 5000
    html = page.read_text(encoding="utf-8")
    assert "pytorch, simulated" in html
    assert "arrival" in html
