"""Spaces of the baselines against brute force, and the public rule by hand."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.plan import baselines
from dflop_jax.plan.baselines import megatron, pipelined, public_rule, pytorch
from dflop_jax.plan.exact_costs import plan_of
from dflop_jax.records import Bucket, SampleShape

LAYERS = {"vision": 3, "llm": 4}
SPACE = {"max_model": 4, "max_stage": 8, "tied": False}


def stage_of(placement):
    """Layer -> (first device of its stage, data, model)."""
    found = {}
    for s in placement.segments:
        m = placement.mesh_of(s)
        assert m.stage == 1
        found |= {(s.module, i): (m.first, m.data, m.model) for i in range(s.start, s.stop)}
    return found


def check(placement, n_devices):
    plan = plan_of(placement)
    assert sorted(d for m in plan.submeshes for d in m.devices) == list(range(n_devices))
    assert {(m, i) for m, n in LAYERS.items() for i in range(n)} == set(stage_of(placement))
    assert len({(m.data, m.model, m.n_devices) for m in plan.submeshes}) == 1


def degrees(n):
    for stages, tp in itertools.product(range(1, n + 1), repeat=2):
        if n % (stages * tp) == 0 and tp <= SPACE["max_model"] and stages <= SPACE["max_stage"]:
            yield stages, n // stages // tp, tp


@pytest.mark.parametrize("n", range(1, 9))
def test_pytorch_deals_the_layers_of_the_whole_model_evenly(n):
    found = list(pytorch(n, LAYERS, **SPACE))
    for p in found:
        check(p, n)
    layers = [(m, i) for m, k in LAYERS.items() for i in range(k)]
    want = []
    for stages, data, tp in degrees(n):
        if stages <= len(layers):
            parts = np.array_split(np.arange(len(layers)), stages)
            want.append(
                {layers[i]: (k * data * tp, data, tp) for k, part in enumerate(parts) for i in part}
            )
    assert sorted(map(sorted, map(dict.items, map(stage_of, found)))) == sorted(
        map(sorted, map(dict.items, want))
    )


@pytest.mark.parametrize("n", range(1, 9))
def test_megatron_puts_encoders_before_an_evenly_cut_llm(n):
    found = list(megatron(n, LAYERS, **SPACE))
    for p in found:
        check(p, n)
    want = []
    for stages, data, tp in degrees(n):
        for e in range(stages):
            if stages - e > LAYERS["llm"] or e > LAYERS["vision"]:
                continue
            at = {}
            for module, parts, first in (("vision", max(e, 1), 0), ("llm", stages - e, e)):
                cut = np.array_split(np.arange(LAYERS[module]), parts)
                for k, part in enumerate(cut):
                    at |= {(module, int(i)): ((first + k) * data * tp, data, tp) for i in part}
            want.append(at)
    assert sorted(map(sorted, map(dict.items, map(stage_of, found)))) == sorted(
        map(sorted, map(dict.items, want))
    )


def test_tied_models_keep_their_llm_in_one_stage():
    for space in (pytorch, megatron):
        for p in space(8, LAYERS, **SPACE | {"tied": True}):
            assert sum(s.module == "llm" for s in p.segments) == 1


def test_a_model_without_encoder_and_one_with_two():
    (alone,) = pytorch(1, {"llm": 2}, **SPACE)
    assert [s.name for s in alone.segments] == ["llm0"]
    assert len(list(megatron(4, {"llm": 2}, **SPACE))) == 5  # 1 or 2 stages: 3 and 2 degrees
    for p in megatron(4, {"vision": 1, "audio": 2, "llm": 2}, **SPACE):
        assert [s.module for s in plan_of(p, (Bucket(1, 8, 1, 1),)).segments][-1] == "llm"


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


class Priced:
    """Stands for ExactCosts: seconds of a module are its mean load over its tensor degree."""

    profile = SimpleNamespace(n_layers=LAYERS)

    def module_s(self, module, mesh, load, squares):
        return load / mesh.model * (10.0 if module == "vision" else 1.0)


def test_public_rule_is_its_formula_and_can_end_slower_than_it_began(monkeypatch):
    monkeypatch.setattr(baselines, "peak_bytes", lambda *_: 0.0)
    shapes = [SampleShape(1, 4, 10), SampleShape(3, 4, 30)]
    args = {"global_batch": 8, "memory_bytes": 1.0}
    space = list(pipelined(4, LAYERS, **SPACE))

    def predicted(p):
        stage = {m: [s for s in p.segments if s.module == m] for m in LAYERS}
        ranks = {m: p.mesh_of(s[0]).data for m, s in stage.items()}
        m = None
        for k in range(1, 8 // ranks["llm"] + 1):
            each = {name: 8 / (k * r) for name, r in ranks.items()}
            if min(each.values()) < 1:
                continue
            m = k
            if 2 * each["vision"] <= 3 and 20 * each["llm"] <= 30:
                break
        each = {name: 8 / (m * r) for name, r in ranks.items()}
        v = 2 * each["vision"] * 10 / p.mesh_of(stage["vision"][0]).model / len(stage["vision"])
        l = 20 * each["llm"] / p.mesh_of(stage["llm"][0]).model / len(stage["llm"])
        return m, (m + len(p.segments) - 1) * max(v, l)

    best = None
    for p in space:
        m, t = predicted(p)
        if best is None or (t < 1.1 * best[2] and m < best[1]):
            best = p, m, t
    p, m, t = public_rule(space, Priced(), shapes, **args)
    assert (p, m) == best[:2]
    assert t == pytest.approx(best[2])
    every = [predicted(q)[1] for q in space]
    assert t > min(every)  # the fastest is refused, since it has no fewer microbatches
    backwards = public_rule(space[::-1], Priced(), shapes, **args)
    assert backwards[2] != pytest.approx(t)  # the order decides


def test_public_rule_says_when_nothing_fits(monkeypatch):
    monkeypatch.setattr(baselines, "peak_bytes", lambda *_: 2.0**31)
    with pytest.raises(ValueError, match=r"no placement fits into 1\.0 GiB"):
        public_rule(
            pipelined(4, LAYERS, **SPACE),
            Priced(),
            [SampleShape(1, 4, 10)],
            global_batch=8,
            memory_bytes=2.0**30,
        )
