"""Bytes that are counted from traces, against XLA's and by hand."""

import dataclasses

import jax.numpy as jnp
import pytest

from dflop_jax.profile.memory import work_of
from dflop_jax.profile.parts import part_work
from dflop_jax.records import BACKWARD, Shape
from models.decoder import DecoderModule
from models.sizes import DECODERS

DEEP = DecoderModule(dataclasses.replace(DECODERS["nano"], n_layers=12, tied=False), jnp.float32)
ROWS = Shape(2, 128)


def test_work_grows_with_layers_and_ticks_as_stated():
    work = work_of(DEEP, ROWS, 1)
    a, c, g = work.activations, work.casts, work.gradients
    assert work.temporaries(0, 1) == work.alive
    assert work.temporaries(3, 1) == pytest.approx(3 * (a + c + g) + work.alive)
    assert work.temporaries(3, 4) == pytest.approx(3 * (5 * a + 2 * c + g) + work.alive)
    inner = work_of(DEEP, ROWS, 1, parts=("layers",))
    assert inner.alive < work.alive


def test_a_layer_that_is_computed_again_keeps_its_input():
    work, again = (work_of(DEEP, ROWS, 1, remat=remat) for remat in (False, True))
    assert again.activations == ROWS.size * DEEP.size.width * 4 < work.activations
    assert (again.casts, again.gradients) == (0.0, work.gradients)


def test_what_edges_place_is_alive_beside_the_entry():
    """The gradient of the features leaves the entry, and is no work of its own."""
    alone, placed = (
        part_work(DEEP, "entry", BACKWARD, ROWS, 1, 2, names) for names in ((), ("visual",))
    )
    assert 0 < alone <= placed
