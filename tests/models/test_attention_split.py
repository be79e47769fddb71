"""Heads over the mesh axis "model": the engine's programs at any degree against degree 1."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import fields, full_params

from dflop_jax.profile.traced_parts import divides
from dflop_jax.records import BACKWARD, MeshShape, SegmentPlan, Shape
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.parameter_layout import param_specs
from dflop_jax.runtime.segment import Segment
from models import attention_gpu
from models.attention import masked_attention
from models.decoder import DecoderModule
from models.sizes import DECODERS

ROWS, TOKENS = 4, 24
F32 = jnp.dtype("float32")


def decoder(heads, kv_heads, kernel, vocab=512):
    size = dataclasses.replace(
        DECODERS["nano"], width=8 * heads, n_heads=heads, n_kv_heads=kv_heads, n_layers=2,
        vocab=vocab,
    )  # fmt: skip
    return DecoderModule(size, F32, attention_kernel=kernel)


def segment(module, mesh_shape):
    mesh = device_mesh(MeshShape(*mesh_shape), jax.devices())
    plan = SegmentPlan("llm", "llm", 0, module.n_layers, "llm", True, True)
    parts = frozenset(("entry", "layers", "exit"))
    return Segment(plan, module, mesh, microbatches=mesh_shape[0], trainable=parts)


@functools.cache
def loss_and_grads(heads, kv_heads, vocab, kernel, mesh_shape):
    """The loss's sum and the gradients of all ranks' sum, by the engine's backward program."""
    module = decoder(heads, kv_heads, kernel, vocab)
    s = segment(module, mesh_shape)
    shape = Shape(ROWS // mesh_shape[0] // mesh_shape[1], TOKENS)
    lowering = Lowering(s)
    structs = lowering.argument_structs(shape, BACKWARD)
    batch = fields(module, ROWS, TOKENS, seed=2)
    params = full_params(module, seed=1)
    found = [params, {}, batch, {"sums": 1.0}, jax.tree.map(lambda a: 0.0, structs[4]), {}]
    args = jax.tree.map(
        lambda a, like: shard_array(
            np.asarray(jnp.broadcast_to(a, like.shape) if np.ndim(a) == 0 else
                       jnp.reshape(a, like.shape), like.dtype), like.sharding),
        tuple(found), structs,
    )  # fmt: skip
    sums, _, grads, _ = lowering.lower(shape, BACKWARD).compile()(*args)
    return jax.device_get((sums["loss_sum"].sum(), jax.tree.map(lambda g: g.sum(0), grads)))


def stand_in(q, k, v, ids, causal):
    past = jnp.tri(q.shape[1], dtype=bool)[None] if causal else True
    return masked_attention(q, k, v, (ids[:, :, None] == ids[:, None]) & past)


def forward(q, k, v, ids, *, causal, interpret, scale):
    return stand_in(q, k, v, ids, causal), q.sum(-1).swapaxes(1, 2)


def backward(q, k, v, ids, out, saved, dout, *, causal, interpret, scale):
    np.testing.assert_equal(saved.shape, (q.shape[0], q.shape[2], q.shape[1]))
    return jax.vjp(lambda *qkv: stand_in(*qkv, ids, causal), q, k, v)[1](dout)


@pytest.fixture
def kernel(monkeypatch):
    """An opaque kernel that the CPU runs; pallas' interpreter is not for several devices."""
    monkeypatch.setattr(attention_gpu, "forward", forward)
    monkeypatch.setattr(attention_gpu, "backward", backward)


def assert_equal(found, want):
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "heads, kv_heads, vocab, mesh_shape",
    [
        (14, 2, 512, (1, 1, 2)),
        (4, 2, 512, (1, 1, 4)),  # kv heads whole on every device, which reads one of them
        (12, 3, 514, (1, 2, 4)),  # query heads of a device of more than one kv head; all words
        (4, 2, 512, (2, 2, 2)),
    ],
)
@pytest.mark.parametrize("name", ["xla", "pallas"])
def test_any_degree_gives_the_same(kernel, heads, kv_heads, vocab, mesh_shape, name):
    want = loss_and_grads(heads, kv_heads, vocab, "xla", (1, 1, 1))
    assert_equal(loss_and_grads(heads, kv_heads, vocab, name, mesh_shape), want)


@pytest.mark.parametrize("heads, kv_heads, ways", [(8, 4, 4), (4, 2, 4), (12, 3, 4)])
def test_nothing_of_attention_is_gathered(kernel, heads, kv_heads, ways):
    s = segment(decoder(heads, kv_heads, "pallas"), (1, 1, ways))
    text = Lowering(s).lower(Shape(ROWS, TOKENS), BACKWARD).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert not [g for g in gathers if re.search(rf"\[{ROWS},{TOKENS},\d+,\d+\]", g)]


def test_a_degree_that_does_not_divide_the_query_heads():
    module = decoder(14, 2, "auto")
    assert [d for d in (1, 2, 4, 7) if divides(module, d)] == [1, 2]
    with pytest.raises(ValueError, match="does not divide by the degree model=4; choose"):
        param_specs(segment(module, (1, 1, 4)))


def test_kv_heads_and_words_are_split_or_whole():
    module = decoder(4, 2, "auto", vocab=510)
    for ways, spec in ((2, "model"), (4, None)):
        specs = param_specs(segment(module, (1, 1, ways)))
        assert specs["layers"]["key"]["kernel"][2] == spec
        assert specs["layers"]["query"]["kernel"][2] == "model"
        assert specs["entry"]["embedding"][0] == spec
