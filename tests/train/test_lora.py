"""LoRA begins as the base model, and its gradients are those of the folded weights."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

from dflop_jax.checkpoint.checkpointer import specs_of
from dflop_jax.contract import with_adapter
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import grad_structs, param_structs
from dflop_jax.runtime.state_arrays import state_arrays

from ..runtime import plain
from ..runtime.test_gradients import assert_trees_close, grads_of
from .lora_cases import (
    ALL_FROZEN,
    DRAWS,
    DROPOUT,
    FREEZE,
    RANK,
    N,
    adapted,
    base,
    dropped_oracle,
    fold,
    initial_params,
    let_act,
    n_bytes,
    oracle,
    samples,
)

# name -> (vision (first, stage, data, model), llm, options)
PLANS = {
    "one device": ((0, 1, 1, 1), (0, 1, 1, 1), {}),
    "tp 2": ((0, 1, 1, 2), (2, 1, 1, 2), {}),
    "llm stage 2, dp 2, tp 2": ((0, 1, 8, 1), (0, 2, 2, 2), {"group_size": 2}),
    "3 segments": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 3}),
    "2 segments of stage 2": ((0, 1, 2, 1), (2, 2, 1, 1), {"llm_segments": 2, "group_size": 2}),
}


def plan_of(name, m):
    vision, llm, options = PLANS[name]
    return plain.plan_of(m, vision, llm, bucket=(24, 160), **options)


def evaluated(m, **kwargs):
    """(sums of a forward pass on text, parameters by module)."""
    plan = plain.plan_of(m, None, (0, 1, 1, 1), bucket=(24, 160))
    ex = Executor(m, plan, optax.sgd(1.0), evaluates=True, **kwargs)
    try:
        ex.init(0)
        ex.programs = dataclasses.replace(ex.programs, backward=(), updates={})
        ex.compile()
        data = plain.random_samples(m, N, 1, max_tiles=0)
        schedule = plain.random_schedule(plan, data, 1, 0)
        handle = ex.run_evaluation(schedule, plain.pack(m, plan, schedule, data))
        return handle.local_result().sums, plain.join(plan, ex.state.params)
    finally:
        ex.close()


def test_it_begins_as_the_base_model_bit_for_bit():
    m, lora = base("bfloat16"), adapted("bfloat16")
    want, params = evaluated(m)
    got, of_lora = evaluated(lora, freeze=FREEZE)
    assert got == want
    adapter = of_lora["llm"].pop("adapter")
    jax.tree.map(np.testing.assert_array_equal, of_lora, params)
    assert set(adapter) == {"query", "key", "value", "out", "gate", "up", "down"}
    for pair in adapter.values():
        assert not pair["b"].any()
        assert pair["a"].shape[-1] == RANK
        # Layers differ, and the product with an input of order one is of order one.
        assert not np.array_equal(pair["a"][0], pair["a"][1])
        fan_in = pair["a"][0].size / RANK
        assert 0.5 < np.sqrt(fan_in) * pair["a"].std() < 1.5


@pytest.mark.parametrize("name", ["tp 2", "2 segments of stage 2"])
def test_the_base_has_no_gradient_and_no_optimizer_state(name):
    m = adapted()
    ex = Executor(m, plan_of(name, m), optax.adam(1e-3), freeze=ALL_FROZEN)
    ex.close()
    total = 0
    for n in ex.trainable:
        segment = ex.programs.segments[n]
        structs = param_structs(segment)
        adapter = n_bytes(structs["adapter"])
        assert n_bytes(grad_structs(segment)) == adapter * segment.data_ranks
        assert n_bytes(ex.programs.updates[n].state_structs) == 2 * adapter + 4  # the count
        assert adapter < 0.3 * n_bytes(structs)
        total += adapter
    size = m.modules["llm"].size
    w, kv, mlp = size.width, size.n_kv_heads * size.head_dim, size.mlp
    sides = (w + w) * 2 + (w + kv) * 2 + (w + mlp) * 3
    assert total == 4 * m.modules["llm"].n_layers * RANK * sides


def test_a_checkpoint_does_not_depend_on_the_plan():
    found = []
    for name in ("one device", "llm stage 2, dp 2, tp 2", "3 segments"):
        m = adapted()
        ex = Executor(m, plan_of(name, m), optax.adam(1e-3), freeze=FREEZE)
        ex.close()
        found.append({n: (s.shape, s.dtype) for n, s in specs_of(state_arrays(ex)).items()})
    assert found[0] == found[1] == found[2]
    layers = adapted().modules["llm"].n_layers
    assert found[0]["params/llm/adapter/up/a"][0][0] == layers
    moments = [n for n in found[0] if "/mu/" in n and n.startswith("opt_state/llm")]
    assert moments
    assert all("/mu/adapter/" in n for n in moments)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"targets": ("q_proj",)}, "lora_targets: 'q_proj' matches no matrix of the model; it has"),
        ({"targets": ("llm.query", "vision.gate")}, "'vision.gate' matches no matrix"),
        (
            {"ranks": (("vision", 2),)},
            "lora_ranks: 'vision' matches no matrix of train.lora_targets",
        ),
        ({"ranks": (("llm", 0),)}, "rank of at least 1"),
        ({"alpha": 0.0}, "rank of at least 1 and an alpha above 0"),
        ({"dropout": 1.0}, "must be at least 0 and below 1"),
    ],
)
def test_patterns_that_cannot_be(settings, says):
    with pytest.raises(ValueError, match=says):
        _ = base().with_lora(2, **{"alpha": 4.0, **settings}).modules


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
    """Patterns choose the matrices and the ranks; all else has no gradient."""
    loss, grads, params = stepped("tower tp 2 x dp 2, llm stage 2 x dp 2, split")
    start, want_loss, want, without_adapters = oracle()
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
    "name, remat", [*zip(WIDE, ("layers", "segment"), strict=True)], ids=[*WIDE]
)
def test_what_adapters_do_not_see_follows_from_the_sample_alone(name, remat):
    """Equal in every plan, packing and recompute policy, and so are gradients."""
    loss, grads, params = stepped(name, remat=remat, dropout=DROPOUT)
    start, of_all, _, without_adapters = oracle()
    want_loss, want = dropped_oracle()
    assert_trees_close(params, start, 1e-6)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_gradients(grads, want)
    assert abs(loss - of_all) > 1e-4  # it matters
    assert abs(loss - without_adapters) > 1e-3


def test_all_parts_are_merged():
    m = adapted(everywhere=True)
    params = initial_params()
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
