"""DIP's and OrchMLLM's results from end to end, on a model small enough for a test."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflop_jax.records import Load
from experiments.paper import dip, dispatching, orch, policies
from experiments.paper.answers import answer, mean_s
from experiments.paper.cases import Case, reported
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


TINY = Case("VLM-tiny", Model(), Drawn(), 4, 16)


pytestmark = pytest.mark.usefixtures("small_profiles")


@pytest.mark.slow
def test_dip_beside_its_baseline_and_part_by_part():
    found, parts = dip.run([TINY]), dip.ablation([TINY])
    base, best = answer(TINY, "megatron"), answer(TINY, "dip")
    assert base.fits, base.words
    assert best.fits, best.words
    assert 0 <= best.idle_share < 1
    assert found.bars["DIP"] == [pytest.approx(base.step_s / best.step_s)]
    assert parts.bars["memory"] == [pytest.approx(best.step_s / base.step_s)]
    (first, *_), parts = best.plan.layout.buckets, max(2, best.plan.layout.fan_in)
    divided = best.plan.with_layout(buckets=(first,), fan_in=parts)  # parts have one shape
    whole = dip.whole_groups(TINY, divided)
    assert whole.layout.fan_in == 1
    assert {m: s.tokens for b in whole.layout.buckets for m, s in b.shapes} == {
        m: s.tokens for b in divided.layout.buckets for m, s in b.shapes
    }
    plain = dip.textbook(TINY, best.plan, best.steps)
    assert [s.schedule.groups for s in plain] == [s.schedule.groups for s in best.steps]
    assert mean_s(best.steps) <= mean_s(plain) * (1 + 1e-9)


@pytest.mark.slow
def test_every_policy_and_the_choice():
    (row,) = policies.run([TINY]).rows
    every = {p: answer(TINY, p) for p in policies.SEARCHED}
    auto = answer(TINY, "auto")
    assert row[7] == auto.plan.policy
    same = every[auto.plan.policy]
    assert auto.plan.predicted.makespan_s == same.plan.predicted.makespan_s
    least = min(a.plan.predicted.makespan_s for a in every.values())
    assert auto.plan.predicted.makespan_s == pytest.approx(least, rel=1e-2)


def test_exchange_against_a_loop_over_pieces():
    found = answer(TINY, "orch")
    plan, step, loads = found.plan, found.steps[0], reported(TINY)[0]
    hardware = replace(TINY.hardware, devices_per_node=2)
    case = replace(TINY, hardware=hardware)
    moved = dispatching.exchange(case, plan, step, loads, named=True)
    inside = across = total = 0.0
    groups = step.schedule.groups
    for source in groups:
        for target in (groups[f] for f in source.feeds):
            low, high = plan.layout.data_ranks(source.module), plan.layout.data_ranks(target.module)
            size = dispatching._token_bytes(case, source.module)
            where = placed(source, loads)
            read = placed(target, loads)
            device = plan.layout.devices(source.module)
            for sample, rank, tokens in where:
                for at in {r for s, r, _ in read if s == sample}:
                    total += size * tokens
                    home = at // (high // np.gcd(low, high)) * (low // np.gcd(low, high))
                    if home != rank:
                        far = device[home] // 2 != device[rank] // 2
                        across += size * tokens * far
                        inside += size * tokens * (not far)
    assert (moved.inside, moved.across) == (pytest.approx(inside), pytest.approx(across))
    assert dispatching.features(case, plan, step, loads) == pytest.approx(total)
    of_homes, of_all = dispatching.home_nodes(case, plan)
    assert 1 <= of_homes <= of_all <= 2
    assert moved.seconds >= 2 * across / 4 / hardware.network_bandwidth
    other = dispatching.exchange(case, plan, step, loads, named=False)
    assert other.across >= 0
    (row,) = orch.nodes([TINY]).rows
    assert row[0] == TINY.name
    (row,) = orch.run([TINY]).rows
    assert row[4] == f"{answer(TINY, 'megatron').step_s / found.step_s:.2f}x"


def placed(group, loads):
    """(sample, rank, tokens) of every piece of a group."""
    numbered = [(s, n) for s, load in enumerate(loads) for n in load.lengths(group.module)]
    return [
        (numbered[piece][0], rank, numbered[piece][1])
        for piece, _, rank, _ in group.pieces.columns.T.tolist()
    ]
