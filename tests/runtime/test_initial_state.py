"""Fresh parameters: drawn where they are held, the same in any plan; and what programs are timed
with."""

import jax
import numpy as np
import optax
import pytest

from dflop_jax.runtime import initial_state
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import owned_param_structs, param_zero_specs
from dflop_jax.runtime.programs import make_programs
from dflop_jax.runtime.synthetic_batch import PIECES_PER_ROW, synthetic_groups
from models.llava import build
from tests.small import Small

from . import plain

MODEL, SMALL = build("nano"), Small()
# name -> (model, vision, llm, options)
PLANS = {
    "a device each": (SMALL, (0, 1, 1, 1), (1, 1, 1, 1), {}),
    "stages, data and model": (MODEL, (0, 1, 2, 2), (0, 2, 2, 2), {"group_size": 2, "rounds": 2}),
    "two segments of the LLM": (SMALL, (0, 1, 4, 1), (4, 1, 1, 2), {"llm_segments": 2}),
    "flat": (SMALL, (0, 1, 5, 1), (0, 1, 3, 2), {}),
    "blocks": (SMALL, (0, 1, 6, 1), (0, 2, 4, 1), {"group_size": 2}),
}
ZERO = {"flat": {"vision": 3, "llm": 3}, "blocks": {"vision": (3, 3), "llm": (3, 2)}}


def alone(module, part, key):
    """A part's parameters by its name's place, layers drawn one by one; on the host."""
    key = jax.random.fold_in(key, ("entry", "layers", "exit").index(part))
    init = jax.jit(lambda k: module.init(part, k))
    if part != "layers":
        return jax.device_get(init(key))
    layers = [jax.device_get(init(k)) for k in jax.random.split(key, module.n_layers)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


@pytest.fixture(scope="module")
def wanted():
    return {
        (module, part): alone(module, part, jax.random.key(7, impl="rbg"))
        for model in (MODEL, SMALL)
        for module in model.modules.values()
        for part in ("entry", "layers", "exit")
    }


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("draw", [initial_state.draw_on_devices, initial_state.draw_on_host])
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_draws_the_same(monkeypatch, wanted, name, draw):
    placed, shard_array = [], initial_state.shard_array

    def spied(array, sharding):
        placed.append(array.nbytes)
        return shard_array(array, sharding)

    monkeypatch.setattr(initial_state, "shard_array", spied)
    model, vision, llm, options = PLANS[name]
    plan = plain.plan_of(model, vision, llm, **options)
    plan = plain.with_zero(plan, **ZERO.get(name, {}))
    for segment in make_segments(model, plan.layout, jax.devices()).values():
        got = draw(segment, jax.random.key(7, impl="rbg"))
        structs, cuts = owned_param_structs(segment), param_zero_specs(segment)
        for part, tree in got.items():
            want = wanted[model.modules[segment.plan.module], part]
            if part == "layers":
                want = jax.tree.map(lambda a, s=segment.plan: a[s.start : s.stop], want)
            for g, w, struct, cut in zip(
                *map(jax.tree.leaves, (tree, want, structs[part], cuts[part])), strict=True
            ):
                whole = plain.whole_of(cut, g)
                if part == "layers":
                    whole = plain.in_order(plan, segment.plan, whole)
                np.testing.assert_array_equal(whole, w)
                assert bool(cut.local_shape) or name != "blocks"
                assert g.sharding == struct.sharding
    on_host = draw is initial_state.draw_on_host
    assert (sum(placed) > 100) == on_host  # else keys, and nothing that a host has drawn


def test_programs_are_timed_on_what_real_rows_hold():
    _, vision, llm, options = PLANS["stages, data and model"]
    plan = plain.plan_of(MODEL, vision, llm, bucket=(4, 64), **options)
    programs = make_programs(MODEL, plan.layout, jax.devices(), optax.sgd(1.0))
    groups, arrays = synthetic_groups(programs, 0)
    held = dict(zip((g.module for g in groups), arrays, strict=True))
    fields = held["llm"].fields
    for row in fields["segment_ids"].reshape(-1, 64):
        np.testing.assert_array_equal(
            row, np.repeat(np.arange(PIECES_PER_ROW) + 1, 64 // PIECES_PER_ROW)
        )
    assert fields["positions"].max() == 64 // PIECES_PER_ROW - 1
    assert (fields["weights"] == 1).all()
    for name in ("tokens", "targets"):
        assert len(np.unique(fields[name])) > 50
        assert 0 <= fields[name].min() <= fields[name].max() < MODEL.vocab_size
    assert len(np.unique(held["vision"].fields["pixels"])) > 50
    ((index,),) = held["llm"].source_indices.values()
    features = programs.signature("vision", groups[0].shape).y["exit"]
    n = features.shape[1] * features.shape[2]
    assert (np.sort(np.unique(index)) == np.arange(min(n, index[0].size))).all()
