"""LoRA: it begins as the base model, its gradients are those of the folded weights under any plan,
the base has neither gradients nor optimizer state, and it is folded into a plain folder."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

from dflop_jax.checkpoint.checkpointer import specs_of, state_arrays
from dflop_jax.config import TrainConfig
from dflop_jax.contract import fold_adapters
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import grad_structs, param_specs, param_structs
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.weights import Folder, ModuleParams, read_segment, write_folder
from models import internvl

from ..runtime import plain
from ..runtime.test_gradients import assert_trees_close, grads_of
from .lora_cases import ALPHA, FREEZE, RANK, N, adapted, base, let_act, n_bytes, oracle, samples

# name -> (vision (first, stage, data, model), llm, options)
PLANS = {
    "one device": ((0, 1, 1, 1), (0, 1, 1, 1), {}),
    "tp 2": ((0, 1, 1, 2), (2, 1, 1, 2), {}),
    "llm stage 2, dp 2, tp 2": ((0, 1, 8, 1), (0, 2, 2, 2), {"group_size": 2}),
    "3 segments": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 3}),
    "2 segments of stage 2": ((0, 1, 2, 1), (2, 2, 1, 1), {"llm_segments": 2, "group_size": 2}),
}


def plan_of(name, m, *, text_only=False):
    vision, llm, options = PLANS[name]
    return plain.plan_of(m, None if text_only else vision, llm, bucket=(24, 160), **options)


def evaluated(m, plan, change=lambda ex: None, **kwargs):
    """(sums of a forward pass, parameters by module, executor)."""
    ex = Executor(m, plan, optax.sgd(1.0), evaluates=True, **kwargs)
    try:
        ex.init(0)
        change(ex)
        ex.programs = dataclasses.replace(
            ex.programs, backward=(), updates={}
        )  # nothing of them is needed
        ex.compile()
        data = plain.random_samples(m, N, 1, max_tiles=3 if "vision" in plan.layout.modules else 0)
        schedule = plain.random_schedule(plan, data, 1, 0)
        handle = ex.run_evaluation(schedule, plain.pack(m, plan, schedule, data))
        return handle.local_result().sums, plain.join(plan, ex.state.params), ex
    finally:
        ex.close()


# ---- it begins as the base model ----


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name, dtype", [("one device", "bfloat16"), ("3 segments", "float32")])
def test_it_begins_as_the_base_model_bit_for_bit(name, dtype):
    tied = name == "one device"
    m, lora = base(tied, dtype), adapted(tied, dtype)
    want, params, _ = evaluated(m, plan_of(name, m, text_only=True))
    got, of_lora, _ = evaluated(lora, plan_of(name, lora, text_only=True), freeze=FREEZE)
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


def test_under_tensor_parallelism_it_begins_equal_to_rounding():
    """Partial sums are added up in another order there."""
    m, lora = base(True), adapted(True)
    want, _, _ = evaluated(m, plan_of("tp 2", m, text_only=True))
    got, _, _ = evaluated(lora, plan_of("tp 2", lora, text_only=True), freeze=FREEZE)
    assert got["llm.loss_sum"] == pytest.approx(want["llm.loss_sum"], rel=1e-6)


# ---- gradients ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llm stage 2, dp 2, tp 2", "2 segments of stage 2"])
def test_gradients_are_those_of_the_folded_weights(name):
    tied = PLANS[name][2].get("llm_segments", 1) == 1
    m = adapted(tied)
    plan = plan_of(name, m)
    schedule = plain.random_schedule(plan, samples(), 2, seed=len(name), text_only=(0,))
    loss, grads, params, _ = grads_of(m, plan, samples(), schedule, freeze=FREEZE, change=let_act)
    start, want_loss, want, without_adapters = oracle(tied)
    assert_trees_close(params, start, 1e-6)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert set(grads["llm"]) == {"adapter"}
    assert_trees_close(grads["llm"], {"adapter": want["llm"]["adapter"]})
    assert_trees_close({"vision": grads["vision"]}, {"vision": want["vision"]})
    assert abs(without_adapters - loss) > 1e-3  # they matter


def test_tensor_parallel_shards_follow_the_axes():
    m = adapted()
    ex = Executor(m, plan_of("tp 2", m), optax.sgd(1.0), freeze=FREEZE)
    ex.close()
    found = param_specs(ex.programs.segments["llm"])["adapter"]
    specs = {k: {n: tuple(spec) for n, spec in pair.items()} for k, pair in found.items()}
    stage = ("stage",)
    for column in ("query", "key", "value"):
        assert specs[column] == {"a": (*stage, None, None), "b": (*stage, None, "model", None)}
    for column in ("gate", "up"):
        assert specs[column] == {"a": (*stage, None, None), "b": (*stage, None, "model")}
    assert specs["out"] == {"a": (*stage, "model", None, None), "b": (*stage, None, None)}
    assert specs["down"] == {"a": (*stage, "model", None), "b": (*stage, None, None)}


# ---- what trains, and what it takes ----


@pytest.mark.parametrize("name", ["tp 2", "2 segments of stage 2"])
def test_the_base_has_no_gradient_and_no_optimizer_state(name):
    m = adapted()
    ex = Executor(m, plan_of(name, m), optax.adam(1e-3), freeze=("vision", "connector", *FREEZE))
    ex.close()
    total = 0
    for n in ex.trainable:
        segment = ex.programs.segments[n]
        structs = param_structs(segment)
        adapter = n_bytes(structs["adapter"])
        assert n_bytes(grad_structs(segment)) == adapter * segment.data_ranks
        count = 4
        assert n_bytes(ex.programs.updates[n].state_structs) == 2 * adapter + count
        assert adapter < 0.3 * n_bytes(structs)
        total += adapter
    decoder = m.modules["llm"]
    w, kv, mlp = (
        decoder.size.width,
        decoder.size.n_kv_heads * decoder.size.head_dim,
        decoder.size.mlp,
    )
    sides = (w + w) * 2 + (w + kv) * 2 + (w + mlp) * 3
    assert total == 4 * decoder.n_layers * RANK * sides


def test_only_adapters_change():
    m = adapted()
    plan = plan_of("3 segments", m)
    train = TrainConfig(steps=20, warmup_steps=0, learning_rate=1e-2)
    freeze = ("vision", "connector", *FREEZE)
    ex = Executor(m, plan, make_optimizer(train), clip_norm=1.0, freeze=freeze)
    try:
        ex.init(0)
        before = plain.join(plan, ex.state.params)
        ex.compile()
        schedule = plain.random_schedule(plan, samples(), 1, 0)
        step = schedule, plain.pack(m, plan, schedule, samples()), {"llm": 1e-2}
        losses = [ex.run_step(*step).result().sums["llm.loss_sum"] for _ in range(4)]
        after = plain.join(plan, ex.state.params)
    finally:
        ex.close()
    same = jax.tree.map(np.array_equal, before, after)
    assert not any(jax.tree.leaves(same["llm"].pop("adapter")))
    assert all(jax.tree.leaves(same))
    assert losses[-1] < losses[0]


# ---- checkpoints ----


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


# ---- the merged folder ----


@pytest.mark.slow
def test_merged_weights_make_a_plain_folder(tmp_path):
    nano = internvl.build("internvl-nano")
    decoder = dataclasses.replace(nano.size.decoder, tied=False)
    size = dataclasses.replace(nano.size, decoder=decoder)
    plain_model = dataclasses.replace(nano, size=size)
    m = plain_model.with_lora(RANK, ALPHA)
    plan = plan_of("2 segments of stage 2", m)
    want, params, ex = evaluated(m, plan, let_act, freeze=FREEZE)
    held = [
        ModuleParams(s.plan.module, fold_adapters(s.module, ex.state.params[n]), s.layer_rows)
        for n, s in ex.programs.segments.items()
    ]
    for part in held:
        assert "adapter" not in part.params
    write_folder(tmp_path / "merged", plain_model.weights, held)
    folder = Folder(tmp_path / "merged", plain_model.weights)
    folder.check()

    def load(other):
        for n, s in other.programs.segments.items():
            other.state.params[n] = read_segment(folder, s)

    got, merged, _ = evaluated(plain_model, plan_of("tp 2", plain_model), load)
    assert got["llm.loss_sum"] == pytest.approx(want["llm.loss_sum"], rel=1e-5)
    layers, pairs = params["llm"]["layers"], params["llm"]["adapter"]
    a, b = pairs["out"]["a"].astype(np.float64), pairs["out"]["b"].astype(np.float64)
    by_hand = layers["out"]["kernel"] + ALPHA / RANK * np.einsum("lhdr,lro->lhdo", a, b)
    np.testing.assert_allclose(merged["llm"]["layers"]["out"]["kernel"], by_hand, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, merged["vision"], params["vision"])
    np.testing.assert_array_equal(
        merged["llm"]["layers"]["attn_norm"]["scale"], layers["attn_norm"]["scale"]
    )


def test_merging_nothing_changes_nothing():
    params = {"entry": {"x": np.ones(2)}, "exit": {}}
    assert adapted().modules["llm"].merged(params) == params


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"targets": ("q_proj",)}, "lora_targets: 'q_proj' matches no matrix of the model; it has"),
        ({"targets": ("llm.query", "vision.gate")}, "'vision.gate' matches no matrix"),
        ({"ranks": (("vision", 2),)}, "lora_ranks: 'vision' matches no matrix that .*targets n"),
        ({"ranks": (("llm", 0),)}, "rank of at least 1"),
        ({"dropout": 1.0}, "must be from 0 to below 1"),
    ],
)
def test_patterns_that_cannot_be(settings, says):
    with pytest.raises(ValueError, match=says):
        _ = base().with_lora(2, 4.0, **settings).modules


def test_what_nothing_matches_stays_the_module_that_it_is():
    modules = base().with_lora(2, 4.0, targets=("vision.up",)).modules
    assert modules["llm"] is not None
    assert modules["llm"] == base().modules["llm"]
    assert set(modules["vision"].freeze_groups) == {"entry", "layers", "exit", "adapter"}


@pytest.mark.parametrize("rank, alpha", [(0, 1.0), (-1, 1.0), (1, 0.0), (1, float("inf"))])
def test_a_rank_or_alpha_that_cannot_be(rank, alpha):
    with pytest.raises(ValueError, match="rank of at least 1 and an alpha above 0"):
        base().with_lora(rank, alpha)
