"""Outputs and every gradient of decoders and towers against transformers, for random small
configurations; of whole models, `tests/verify` compares them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import (
    check,
    logits,
    randomise,
    text_batch,
    torch,
    transformers,
)
from model_fields import forward

from models import hf
from models.decoder import DecoderModule
from models.processors import MEAN, STD
from models.sizes import DecoderSize, VisionSize
from models.vit import VisionModule

F32 = jnp.dtype("float32")
SEEDS = range(3)


def draw_decoder(rng, **fixed):
    kv, group, head_dim = rng.integers(1, 4), rng.integers(1, 4), 2 * rng.integers(2, 5)
    choices = {
        "n_layers": int(rng.integers(1, 4)),
        "mlp": int(rng.integers(10, 50)),
        "vocab": int(rng.integers(20, 60)),
        "rope_theta": float(rng.choice([1e4, 5e5, 1e6])),
        "norm_eps": float(rng.choice([1e-5, 1e-6])),
        "qkv_bias": bool(rng.random() < 0.7),
        "tied": bool(rng.random() < 0.5),
    }
    heads = {"n_heads": int(kv * group), "n_kv_heads": int(kv)}
    return DecoderSize(width=int(kv * group * head_dim), **heads, **(choices | fixed))


def draw_vision(rng, form, merge, six=False):
    """Of an InternViT the form of 300M, or of 6B."""
    patch, heads = int(rng.integers(2, 6)), int(rng.integers(1, 5))
    grid = merge * int(rng.integers(1, 4))
    spare = int(rng.integers(0, patch)) if merge == 1 else 0
    intern = {}
    if form == "internvit":
        intern = {"qkv_bias": not six, "qk_norm": six, "rms_norm": six}
    return VisionSize(
        tile_px=grid * patch + spare,
        patch_px=patch,
        width=4 * heads * int(rng.integers(1, 4)),
        n_layers=int(rng.integers(1, 4)),
        n_heads=heads,
        mlp=int(rng.integers(10, 50)),
        merge=merge,
        post_norm=False,
        form=form,
        **intern,
    )


def reference(map_, cls, seed):
    """A random model of transformers of the map's configuration."""
    kind = map_.config["model_type"]
    config = transformers.AutoConfig.for_model(**{"model_type": kind, **map_.config})
    model = randomise(cls(config), seed)
    # As it is written: what equals transformers' defaults is left out.
    assert map_.mismatches(json.loads(config.to_json_string())) == []
    return model


def draw_tiles(rng, size, n):
    shape = (n, size.tile_px, size.tile_px, 3)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def normed(pixels, mean, std):
    x = (pixels.astype(np.float64) / 255 - mean) / std
    return torch.from_numpy(x.astype(np.float32).transpose(0, 3, 1, 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_decoder(seed):
    rng = np.random.default_rng(seed)
    size = draw_decoder(rng, qkv_bias=seed != 1)  # 0, 2: Qwen2; 1: Llama
    module = DecoderModule(size, F32)
    map_ = hf.decoder(module)
    cls = transformers.Qwen2ForCausalLM if size.qkv_bias else transformers.LlamaForCausalLM
    model = reference(map_, cls, seed)
    tokens = rng.integers(0, size.vocab, (2, int(rng.integers(1, 12))))
    want = model(input_ids=torch.from_numpy(tokens)).logits
    batch = text_batch(tokens, jnp.zeros((*tokens.shape, size.width)))
    check(map_, model, want, lambda p: logits(module, p["llm"], batch), f"decoder {seed}")


@pytest.mark.parametrize(
    "form, six", [("siglip", False), ("internvit", False), ("internvit", True)]
)
def test_tower_alone(form, six):
    """The tower of a folder of its own, within a module that has a connector too."""
    rng = np.random.default_rng(7)
    size = draw_vision(rng, form, 1 if form == "siglip" else 2, six)
    module = VisionModule(size, 8, F32)
    map_ = hf.tower(module)
    siglip, intern = transformers.SiglipVisionModel, transformers.InternVLVisionModel
    model = reference(map_, siglip if form == "siglip" else intern, 7)
    pixels = draw_tiles(rng, size, 2)
    mean, std = (0.5, 0.5) if form == "siglip" else (MEAN, STD)
    out = model(pixel_values=normed(pixels, mean, std), output_hidden_states=True)
    batch = {"pixels": jnp.asarray(pixels)}

    check(map_, model, out.hidden_states[-1], lambda p: forward(module, p["vision"], batch), form)
