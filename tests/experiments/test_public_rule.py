"""The public DFLOP optimizer's space against brute force, and its rule by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

import experiments.paper.public_rule as rule
from dflop_jax.records import Bucket, Layout, Plan, Shape
from experiments.paper.public_rule import pipelined, public_rule
from tests.plan.test_baselines import LAYERS, SPACE, degrees, stage_of


@pytest.mark.parametrize("n", range(1, 7))
def test_pipelined_is_every_pair_of_degrees_on_disjoint_devices(n):
    found = [stage_of(p) for p in pipelined(n, LAYERS, **SPACE)]

    def one(k, module, first):
        for stages, data, tp in degrees(k):
            if stages <= LAYERS[module]:
                cut = np.array_split(np.arange(LAYERS[module]), stages)
                yield {
                    (module, int(i)): (first + j * data * tp, data, tp)
                    for j, part in enumerate(cut)
                    for i in part
                }

    want = [v | l for k in range(1, n) for v in one(k, "vision", 0) for l in one(n - k, "llm", k)]
    assert len(found) == len(want)
    assert all(w in found for w in want)


def test_pipelined_knows_one_encoder():
    with pytest.raises(ValueError, match="knows one encoder"):
        list(pipelined(4, {"llm": 2}, **SPACE))


COSTS = SimpleNamespace(profile=SimpleNamespace(piece_tokens={"vision": 16}))
SAMPLES = {"vision": (np.array([1.0, 3.0]), None), "llm": (np.array([10.0, 30.0]), None)}


def segment_s(_, plan, amounts):
    """Seconds of a module are its amount over its tensor degree, even over its stages."""
    return {
        s.name: amounts[s.module][0] * (10.0 if s.module == "vision" else 1.0)
        / plan.layout.submesh(s.submesh).model / len(plan.layout.segments_of(s.module))
        for s in plan.layout.segments
    }  # fmt: skip


def space():
    """Of 4 devices."""
    bucket = (Bucket.of({"llm": Shape(1, 1)}),)
    return [
        Plan("dflop", Layout(p.submeshes, p.segments, bucket))
        for p in pipelined(4, LAYERS, **SPACE)
    ]


def test_public_rule_is_its_formula_and_can_end_slower_than_it_began(monkeypatch):
    monkeypatch.setattr(rule, "peak_bytes", lambda *_: 0.0)
    monkeypatch.setattr(rule, "segment_s", segment_s)
    args = {"global_batch": 8, "memory_bytes": 1.0}
    plans = space()

    def predicted(p):
        stage = {m: p.layout.segments_of(m) for m in LAYERS}
        tensor = {m: p.layout.submesh(s[0].submesh).model for m, s in stage.items()}
        ranks = {m: p.layout.data_ranks(m) for m in LAYERS}
        m = None
        for k in range(1, 8 // ranks["llm"] + 1):
            each = {name: 8 / (k * r) for name, r in ranks.items()}
            if min(each.values()) < 1:
                continue
            m = k
            if 2 * each["vision"] <= 3 and 20 * each["llm"] <= 30:
                break
        each = {name: 8 / (m * r) for name, r in ranks.items()}
        v = 2 * each["vision"] * 10 / tensor["vision"] / len(stage["vision"])
        l = 20 * each["llm"] / tensor["llm"] / len(stage["llm"])
        return m, (m + len(p.layout.segments) - 1) * max(v, l)

    best = None
    for p in plans:
        m, t = predicted(p)
        if best is None or (t < 1.1 * best[2] and m < best[1]):
            best = p, m, t
    p, m, t = public_rule(plans, COSTS, SAMPLES, **args)
    assert (p, m) == best[:2]
    assert t == pytest.approx(best[2])
    every = [predicted(q)[1] for q in plans]
    assert t > min(every)  # the fastest is refused, since it has no fewer microbatches
    backwards = public_rule(plans[::-1], COSTS, SAMPLES, **args)
    assert backwards[2] != pytest.approx(t)  # the order decides


def test_public_rule_says_when_nothing_fits(monkeypatch):
    monkeypatch.setattr(rule, "peak_bytes", lambda *_: 2.0**31)
    with pytest.raises(ValueError, match=r"no placement fits into 1\.0 GiB"):
        public_rule(space(), COSTS, SAMPLES, global_batch=8, memory_bytes=2.0**30)
