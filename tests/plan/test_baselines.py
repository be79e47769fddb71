"""Spaces of the baselines against brute force."""

import itertools
from functools import partial

import numpy as np
import pytest

from dflop_jax.plan.space import baseline_layouts

LAYERS = {"vision": 3, "llm": 4}
SPACE = {"max_model": 4, "max_stage": 8}
pytorch, megatron = (partial(baseline_layouts, p) for p in ("pytorch", "megatron"))


def stage_of(placement):
    """Layer -> (first device of its stage, data, model)."""
    found = {}
    for s in placement.segments:
        m = placement.submesh(s.submesh)
        assert m.stage == 1
        found |= {(s.module, i): (m.first, m.data, m.model) for i in range(s.start, s.stop)}
    return found


def check(placement, n_devices):
    assert sorted(d for m in placement.submeshes for d in m.devices) == list(range(n_devices))
    assert {(m, i) for m, n in LAYERS.items() for i in range(n)} == set(stage_of(placement))
    assert len({(m.data, m.model, m.n_devices) for m in placement.submeshes}) == 1


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
def test_megatron_puts_other_modules_before_an_evenly_cut_last_one(n):
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


def test_models_of_one_and_of_three_modules():
    (alone,) = pytorch(1, {"llm": 2}, **SPACE)
    assert [s.name for s in alone.segments] == ["llm0"]
    assert len(list(megatron(4, {"llm": 2}, **SPACE))) == 5  # 1 or 2 stages: 3 and 2 degrees
    for p in megatron(4, {"vision": 1, "audio": 2, "llm": 2}, **SPACE):
        assert p.segments[-1].module == "llm"
