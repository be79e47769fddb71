"""Bytes that are counted from traces, against XLA's and by hand."""

import dataclasses

import jax.numpy as jnp
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.profile.recompute import POLICIES, Predictor
from dflop_jax.profile.traced_parts import TraceSpec, live_bytes, program_bytes
from dflop_jax.records import LayerTiming, Recompute, Shape
from models.decoder import DecoderModule
from models.llava import build
from models.sizes import DECODERS

DEEP = DecoderModule(dataclasses.replace(DECODERS["nano"], n_layers=12, tied=False), jnp.float32)
ROWS = Shape(2, 128)
WHOLE = TraceSpec(DEEP, "layers", ROWS)


def test_the_ends_of_a_loss_keep_nothing():
    layer, ends, _ = program_bytes(WHOLE, 2, loss=True)
    assert layer > DEEP.size.width * ROWS.size * 4
    assert ends == 0.0 < program_bytes(WHOLE, 2)[1]
    assert (
        program_bytes(dataclasses.replace(WHOLE, remat="layers"), 2)[0]
        == DEEP.size.width * ROWS.size * 4
    )


def test_live_bytes_are_those_of_the_largest_part():
    inner, again = (
        live_bytes(dataclasses.replace(WHOLE, remat=remat), 2) for remat in ("none", "layers")
    )
    assert inner <= program_bytes(WHOLE, 2)[2]
    assert inner <= again


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_policies_keep_their_share_of_what_compiled_programs_keep(factor):
    """Beside the input of a layer, which all keep; where temporaries tell, no less than traced."""
    tower = build("nano").modules["vision"]
    for module, shape in ((tower, Shape(2, tower.size.tokens_in_tower)), (DEEP, ROWS)):
        predictor = Predictor(module, (), 1, find_hardware("h100"), 4)
        traced = {r: c.layer_bytes for r, c in predictor.policy_costs([shape])[shape].items()}
        least, most = traced["layers"], traced["none"]
        compiled = Recompute(layer_bytes=least + factor * (most - least))
        timing = LayerTiming("m", 1, shape, 1.0, 2.0, 0.1, 0.1, 8.0, recompute={"none": compiled})
        (beside,) = predictor.add_policies([timing])
        got = {r: beside.recompute[r].layer_bytes for r in POLICIES}
        more = max(factor, 1.0) if module is DEEP else factor
        assert got["layers"] == least < most
        for r in POLICIES:
            assert got[r] == pytest.approx(least + more * (traced[r] - least))
