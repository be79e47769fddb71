"""The generator: packed clips do not meet, and their captions are what they hear."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import forward, full_params

from dflop_jax.data.datasets.clips import clip_format_of
from models import wan, wan_layers
from models.sizes import DECODERS
from models.wan_sizes import WAN, find_size, read_config, wan_config

MODEL = wan.build("nano+wan-nano")
FORM = clip_format_of(MODEL)
GENERATOR = MODEL.generator


def piece(n_text, grid, seed):
    """Fields of one clip, [tokens, ...], its text states random."""
    rng = np.random.default_rng(seed)
    tokens = FORM.tokens(n_text, grid)
    values = GENERATOR.size.patch_values
    fields = FORM.fields(n_text, grid)
    noisy, target = (rng.normal(size=(tokens, values)).astype(np.float32) for _ in range(2))
    text = rng.normal(size=(tokens, GENERATOR.size.text_width)).astype(np.float32)
    time = np.full(tokens, 1000 * rng.random(), np.float32)
    return {**fields, "latents": noisy, "target": target, "text": text, "time": time}


def row(pieces, tokens):
    """Pieces side by side in one row, [1, tokens, ...]."""
    parts = [
        {**p, "segment_ids": np.full(len(p["role"]), k, np.int32)} for k, p in enumerate(pieces, 1)
    ]
    joined = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    missing = tokens - len(joined["role"])
    return {
        name: jnp.asarray(np.pad(a, ((0, missing), *((0, 0),) * (a.ndim - 1)))[None])
        for name, a in joined.items()
    }


@jax.jit
def said(params, batch):
    return GENERATOR.velocity(params["exit"], forward(GENERATOR, params, batch), batch)[0]


def test_a_clip_says_the_same_alone_and_among_others():
    params = full_params(GENERATOR)
    one, other = piece(5, (2, 2, 3), 0), piece(3, (1, 4, 2), 1)
    changed = {**other, "latents": other["latents"] + 1, "text": -other["text"]}
    changed["time"] = other["time"] / 2
    n, clip = len(one["role"]), one["role"] == wan_layers.CLIP
    packed = np.asarray(said(params, row([one, other], 64)))
    alone = np.asarray(said(params, row([one], 64)))
    behind = np.asarray(said(params, row([changed, one], 64)))
    np.testing.assert_array_equal(packed[:n][clip], alone[:n][clip])
    start = len(other["role"])
    np.testing.assert_allclose(behind[start : start + n][clip], alone[:n][clip], atol=2e-6)
    moved = np.asarray(said(params, row([one, changed], 64)))
    np.testing.assert_array_equal(moved[:n], packed[:n])
    assert not np.array_equal(moved[n:], packed[n:])


def test_long_rows_read_their_text_in_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 32, 2, 4)), jnp.float32) for _ in range(3))
    role = jnp.asarray(rng.choice([1, wan_layers.TEXT, wan_layers.CLIP], (2, 32)))
    ids = jnp.asarray(np.repeat([[1, 2], [1, 1]], 16, axis=1))

    def total(q, k, v):
        heard = wan_layers.attend_to_text(q, k, v, role, ids)
        return jnp.sum(jnp.where((role == wan_layers.CLIP)[..., None, None], heard, 0.0) ** 2)

    whole = jax.value_and_grad(total, (0, 1, 2))(q, k, v)
    monkeypatch.setattr(wan_layers, "QUERY_BLOCK", 8)
    blocks = jax.value_and_grad(total, (0, 1, 2))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, blocks)


def test_sizes_are_those_of_published_configurations():
    config = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "ffn_dim": 8960,
              "num_layers": 30, "rope_max_seq_len": 1024}  # fmt: skip
    assert read_config(config) == WAN["wan2.1-1.3b"]
    for size in WAN.values():
        assert read_config(wan_config(size)) == size
    assert read_config({"_class_name": "WanTransformer3DModel"}) == WAN["wan2.1-14b"]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"_class_name": "FluxTransformer2DModel"}, "_class_name is 'Flux"),
        ({"image_dim": 1280}, "image_dim is 1280"),
        ({"out_channels": 20}, "out_channels is 20"),
        ({"patch_size": [1, 2]}, "patch_size"),
    ],
)
def test_a_generator_of_another_form_is_refused(change, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(wan_config(WAN["wan-nano"]) | change))
    with pytest.raises(ValueError, match=says):
        find_size(f"nano+{tmp_path}")


def test_a_folder_gives_the_generators_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(wan_config(WAN["wan-nano"])))
    found = find_size(f"nano+{tmp_path}")
    assert (found.decoder, found.generator) == (DECODERS["nano"], WAN["wan-nano"])
    with pytest.raises(ValueError, match="unknown model size 'nano'"):
        find_size("nano")
    with pytest.raises(ValueError, match="three numbers"):
        dataclasses.replace(WAN["wan-nano"], patch=(1, 0, 2))
