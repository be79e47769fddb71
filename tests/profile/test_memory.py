"""Bytes that are counted from traces, against XLA's and by hand."""

import dataclasses

import jax.numpy as jnp

from dflop_jax.profile.memory import kept_bytes, temporaries
from dflop_jax.profile.parts import part_work
from dflop_jax.records import BACKWARD, Shape
from models.decoder import DecoderModule
from models.sizes import DECODERS

DEEP = DecoderModule(dataclasses.replace(DECODERS["nano"], n_layers=12, tied=False), jnp.float32)
ROWS = Shape(2, 128)


def test_the_ends_of_a_loss_keep_nothing():
    layer, ends = kept_bytes(DEEP, ROWS, 1, loss=True)
    assert layer > DEEP.size.width * ROWS.size * 4
    assert ends == 0.0 < kept_bytes(DEEP, ROWS, 1)[1]
    assert kept_bytes(DEEP, ROWS, 1, "layers")[0] == DEEP.size.width * ROWS.size * 4


def test_temporaries_are_those_of_the_largest_part():
    whole, inner, again = (
        temporaries(DEEP, ROWS, 1, remat, parts=parts)
        for remat, parts in (("none", None), ("none", ("layers",)), ("layers", ("layers",)))
    )
    assert inner <= whole
    assert inner <= again


def test_what_edges_place_is_alive_beside_the_entry():
    """The gradient of the features leaves the entry, and is no work of its own."""
    alone, placed = (
        part_work(DEEP, "entry", BACKWARD, ROWS, 1, 2, names) for names in ((), ("visual",))
    )
    assert 0 < alone <= placed
