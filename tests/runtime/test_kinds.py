"""A module with layers of two kinds, which may hand on more than hidden states: its gradients equal
the plain model's under any cut, and a checkpoint goes on under another one."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.layout import make_segments
from dflop_jax.train.optimizer import make_optimizer
from tests.checkpoint.checkpoint_cases import TRAIN
from tests.mixed import Mixed, MixedText

from . import plain

ALONE = (0, 1, 1, 1)


@pytest.mark.parametrize("pattern, rounds", [("mmgm", 1), ("mgmgmmgg", 2)])
def test_stages_of_other_kinds_are_refused(pattern, rounds):
    m = Mixed(pattern=pattern)
    plan = plain.plan_of(m, ALONE, (0, 2, 1, 1), group_size=2, rounds=rounds)
    with pytest.raises(ValueError, match=r"not of the same kinds.* 2 stages.*cut it into segments"):
        make_segments(m, plan.layout, jax.devices())


def executor(m, *llm, zero=1, **options):
    plan = plain.plan_of(m, None, llm, bucket=(0, 96), **options)
    plan = plain.with_zero(plan, llm=zero)
    return Executor(m, plan, make_optimizer(TRAIN), clip_norm=1.0)


@dataclass(frozen=True)
class HalfText(MixedText):
    """Works in bfloat16, but for two parameters of one kind."""

    working_dtype = jnp.bfloat16
    float32_names = ("value", "out")

    def layer(self, params, x, batch, kind):
        named = kind == "gate" and params["value"].dtype == params["out"].dtype == jnp.float32
        assert named or {a.dtype for a in params.values()} == {jnp.dtype(jnp.bfloat16)}
        return super().layer(in_float32(params), x, batch, kind)

    def entry(self, params, batch):
        return super().entry(in_float32(params), batch)

    def exit(self, params, x, batch, entry):
        return super().exit(in_float32(params), x, batch, entry and in_float32(entry))


def in_float32(params):
    return jax.tree.map(lambda a: a.astype(jnp.float32), params)


class Half(Mixed):
    @property
    def modules(self):
        text = HalfText(len(self.pattern), self.tied, self.pattern)
        return {**super().modules, "llm": text}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("zero", [3, 1, 2])
def test_parameters_of_a_kind_stay_float32(zero):
    """Through steps that donate what they replace, each once."""
    m = Half(tied=False, pattern="mgmg")
    samples = plain.random_samples(m, 8, 5, max_tiles=0)
    ex = executor(m, 0, 1, 2, 1, zero=zero)
    try:
        ex.init(0)
        ex.compile()
        first, *_, last = plain.losses_of(ex, samples, 0, 4)
        assert last < first
        held, masters = ex.state.params["llm"], ex.state.masters["llm"]
        for name, a in held["gate"].items():
            assert a.dtype == (jnp.bfloat16 if name == "gate" else jnp.float32)
            if zero == 3:
                np.testing.assert_array_equal(a, np.asarray(masters["gate"][name], a.dtype))
    finally:
        ex.close()
