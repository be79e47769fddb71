"""Fresh parameters, the same in any plan; and what programs are timed with."""

import functools

import jax
import numpy as np
import optax
import pytest

from dflop_jax.runtime.calibration import PIECES_PER_ROW, synthetic_groups
from dflop_jax.runtime.initial_state import draw_parameters
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import owned_param_structs, param_zero_specs
from dflop_jax.runtime.programs import make_programs
from models.llava import build
from tests.small import Small

from . import plain

MODEL, SMALL, KEY = build("nano"), Small(), jax.random.key(7, impl="rbg")
# name -> (model, vision, llm, options, ZeRO)
PLANS = {
    "a device each": (SMALL, (0, 1, 1, 1), (1, 1, 1, 1), {}, {}),
    "stages, data and model": (
        MODEL, (0, 1, 2, 2), (0, 2, 2, 2), {"group_size": 2, "rounds": 2}, {}
    ),
    "two segments of the LLM": (SMALL, (0, 1, 4, 1), (4, 1, 1, 2), {"llm_segments": 2}, {}),
    "flat": (SMALL, (0, 1, 5, 1), (0, 1, 3, 2), {}, {"vision": 3, "llm": 3}),
    "blocks": (
        SMALL, (0, 1, 6, 1), (0, 2, 4, 1), {"group_size": 2}, {"vision": (3, 3), "llm": (3, 2)}
    ),
}  # fmt: skip


@functools.cache
def alone(module, part):
    """A part's parameters by its name's place, layers drawn one by one; on the host."""
    key = jax.random.fold_in(KEY, ("entry", "layers", "exit").index(part))
    init = jax.jit(lambda k: module.init(part, k))
    if part != "layers":
        return jax.device_get(init(key))
    layers = [jax.device_get(init(k)) for k in jax.random.split(key, module.n_layers)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_draws_the_same(name):
    model, vision, llm, options, zero = PLANS[name]
    plan = plain.with_zero(plain.plan_of(model, vision, llm, **options), **zero)
    for segment in make_segments(model, plan.layout, jax.devices()).values():
        got = draw_parameters(segment, KEY)
        structs, specs = owned_param_structs(segment), param_zero_specs(segment)
        for part, tree in got.items():
            want = alone(model.modules[segment.plan.module], part)
            if part == "layers":
                want = jax.tree.map(lambda a, s=segment.plan: a[s.start : s.stop], want)
            for g, w, struct, spec in zip(
                *map(jax.tree.leaves, (tree, want, structs[part], specs[part])), strict=True
            ):
                whole = plain.whole_of(spec, g)
                if part == "layers":
                    whole = plain.in_order(plan, segment.plan, whole)
                np.testing.assert_array_equal(whole, w)
                assert bool(spec.local_shape) or name != "blocks"
                assert g.sharding == struct.sharding


def test_programs_are_timed_on_what_real_rows_hold():
    plan = plain.plan_of(MODEL, (0, 1, 2, 2), (0, 2, 2, 2), bucket=(4, 64), group_size=2, rounds=2)
    programs = make_programs(MODEL, plan.layout, jax.devices(), optax.sgd(1.0))
    groups, arrays = synthetic_groups(programs, 0)
    held = dict(zip((g.module for g in groups), arrays, strict=True))
    fields, length = held["llm"].fields, 64 // PIECES_PER_ROW
    for row in fields["segment_ids"].reshape(-1, 64):
        np.testing.assert_array_equal(row, np.repeat(np.arange(PIECES_PER_ROW) + 1, length))
    assert fields["positions"].max() == length - 1
    assert (fields["weights"] == 1).all()
    for values in (fields["tokens"], fields["targets"], held["vision"].fields["pixels"]):
        assert len(np.unique(values)) > 50
    assert 0 <= fields["tokens"].min() <= fields["tokens"].max() < MODEL.vocab_size
    ((index,),) = held["llm"].source_indices.values()
    features = programs.signature("vision", groups[0].shape).y["exit"]
    n = features.shape[1] * features.shape[2]
    assert (np.sort(np.unique(index)) == np.arange(min(n, index[0].size))).all()
