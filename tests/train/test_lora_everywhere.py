"""Adapters in towers and ends, of chosen matrices and ranks, that may not see all: their gradients
are those of one device, whatever the plan."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from dflop_jax.contract import with_adapter
from dflop_jax.runtime.segment import field_names

from ..runtime import plain
from ..runtime.test_gradients import assert_trees_close, grads_of
from .lora_cases import (
    ALL_FROZEN,
    DRAWS,
    DROPOUT,
    FREEZE,
    RANK,
    adapted,
    dropped_oracle,
    fold,
    let_act,
    oracle,
    samples,
)
from .test_lora import evaluated, plan_of

SIX = {"query", "key", "value", "out", "up", "down"}
WIDE = {
    "tower tp 2 x dp 2, llm stage 2 x dp 2, split": (
        ((0, 1, 2, 2), (4, 2, 2, 1), {"group_size": 2, "rounds": 2}),
        {"vision": 2, "llm": 3},
    ),
    "tower of dp 3, split, llm in 3 segments": (
        ((0, 1, 3, 1), (3, 1, 1, 1), {"llm_segments": 3}),
        {"vision": 3},
    ),
    "tower of stage 2, llm of tp 2": (((0, 2, 1, 1), (2, 1, 1, 2), {"group_size": 2}), {}),
}


def stepped(name, *, remat="none", dropout=0.0):
    """(model, loss, gradients, parameters) of a step of a plan of `WIDE`."""
    (vision, llm, options), degrees = WIDE[name]
    m = adapted(everywhere=True, dropout=dropout)
    plan = plain.with_zero(plain.plan_of(m, vision, llm, bucket=(24, 160), **options), **degrees)
    segments = (dataclasses.replace(s, remat=remat) for s in plan.layout.segments)
    plan = plan.with_layout(segments=tuple(segments))
    schedule = plain.random_schedule(plan, samples(), 2, seed=3 + len(name), text_only=(0,))
    draws = {"draws": DRAWS} if dropout else {}
    loss, grads, params, _ = grads_of(
        m, plan, samples(), schedule, freeze=ALL_FROZEN, change=let_act, **draws
    )
    adapters = {
        "vision": {"entry_adapter": {"patch"}, "adapter": SIX, "exit_adapter": {"out"}},
        "llm": {"adapter": {"query", "key", "value", "out", "gate", "up", "down"}},
    }
    assert {n: {p: set(t) for p, t in parts.items()} for n, parts in grads.items()} == adapters
    return loss, grads, params


def assert_gradients(grads, want):
    for module, parts in grads.items():
        assert_trees_close(parts, {part: want[module][part] for part in parts})


@pytest.mark.slow
def test_gradients_of_adapters_in_the_tower_and_its_ends():
    """Patterns choose the matrices and the ranks; all else is frozen and has no gradient. Other
    plans are below."""
    loss, grads, params = stepped("tower tp 2 x dp 2, llm stage 2 x dp 2, split")
    start, want_loss, want, without_adapters = oracle(False, everywhere=True)
    assert_trees_close(params, start, 1e-6)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_gradients(grads, want)
    ranks = {t: pair["a"].shape[-1] for t, pair in params["vision"]["adapter"].items()}
    assert ranks == {"query": 2, "key": 2, "value": 2, "out": 1, "up": 5, "down": 2}
    assert params["llm"]["adapter"]["out"]["a"].shape[-1] == 1
    assert params["llm"]["adapter"]["up"]["a"].shape[-1] == RANK
    assert abs(without_adapters - loss) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, remat", [*zip(WIDE, ("layers", "none", "segment"), strict=True)], ids=[*WIDE]
)
def test_what_adapters_do_not_see_follows_from_the_sample_alone(name, remat):
    """Equal in every plan, packing and recompute policy, and so are gradients."""
    loss, grads, params = stepped(name, remat=remat, dropout=DROPOUT)
    start, of_all, _, without_adapters = oracle(False, everywhere=True)
    want_loss, want = dropped_oracle()
    assert_trees_close(params, start, 1e-6)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_gradients(grads, want)
    assert abs(loss - of_all) > 1e-4  # it matters
    assert abs(loss - without_adapters) > 1e-3


@pytest.mark.slow
def test_evaluation_sees_all_and_no_dropout_costs_nothing():
    plain_model, m = adapted(), adapted(dropout=DROPOUT)
    plan = plan_of("tp 2", m, text_only=True)
    want, _, ex = evaluated(plain_model, plan, let_act, freeze=FREEZE)
    got, _, drops = evaluated(m, plan, let_act, freeze=FREEZE)
    assert got["llm.loss_sum"] == pytest.approx(want["llm.loss_sum"], rel=1e-6)
    fields = [field_names(e.programs.segments["llm"]) for e in (ex, drops)]
    assert fields == [tuple(n for n in fields[1] if n != "seeds"), (*fields[0], "seeds")]
    llm = adapted().modules["llm"]
    assert not llm.numbers_layers
    assert llm == adapted(dropout=0.0).modules["llm"]


def test_all_parts_are_merged():
    m = adapted(everywhere=True)
    params, *_ = oracle(False, everywhere=True)
    for name, module in m.modules.items():
        merged = module.merged(params[name])
        assert set(merged) == {"entry", "layers", "exit"}
        for part, tree in merged.items():
            layers = range(module.n_layers) if part == "layers" else [...]
            for layer in layers:
                of_layer = jax.tree.map(lambda a, n=layer: a[n], with_adapter(part, params[name]))
                got = jax.tree.map(lambda a, n=layer: a[n], tree)
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, fold(of_layer)
                )
