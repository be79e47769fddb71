"""Sizes against published parameter counts, FLOPs against XLA's, and the shape of the contract."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import PARTS, fields

from dflop_jax.contract import MODEL_SHARDED, MultimodalModel
from models.decoder import DecoderModule
from models.llava import build
from models.sizes import DECODERS, SIZES, VISION, DecoderSize, VisionSize
from models.vit import VisionModule

F32 = jnp.dtype("float32")


def specs(module, part):
    return jax.eval_shape(lambda key: module.init(part, key), jax.random.key(0))


def count(module, part):
    return sum(math.prod(a.shape) for a in jax.tree.leaves(specs(module, part)))


def n_params(module):
    return sum(count(module, p) * (module.n_layers if p == "layers" else 1) for p in PARTS)


@pytest.mark.parametrize(
    "name, published",
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_decoder_parameters_as_published(name, published):
    assert n_params(DecoderModule(DECODERS[name], F32)) == published


def test_siglip_parameters_as_published():
    size, out = VISION["siglip-so400m"], 896
    width, mlp = size.width, size.mlp
    connector = width * out + out + out * out + out
    # The published count includes the attention-pooling head, which a LLaVA does not have: a
    # probe, four projections, a norm and an MLP.
    pooling = width + 4 * (width**2 + width) + 2 * width + 2 * width * mlp + mlp + width
    assert n_params(VisionModule(size, out, F32)) - connector + pooling == 428_225_600


@pytest.mark.parametrize("name", SIZES)
def test_every_size_fits_the_contract(name):
    model: MultimodalModel = build(name, "bfloat16")
    assert list(model.modules) == ["vision", "llm"]
    assert model.vocab_size == SIZES[name].decoder.vocab
    assert 1 <= model.tokens_per_tile <= model.patches_per_tile <= model.tile_px**2
    for module in model.modules.values():
        assert set(module.inputs) == set(module.freeze_groups) == set(PARTS)
        for part in PARTS:
            arrays = specs(module, part)
            names = module.logical_axes(part)
            ranks = jax.tree.map(len, names, is_leaf=lambda x: isinstance(x, tuple))
            assert ranks == jax.tree.map(lambda a: a.ndim, arrays)
            assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(arrays))


def test_layers_split_over_the_model_axis():
    def share(module):
        shapes = jax.tree.leaves(specs(module, "layers"))
        names = jax.tree.leaves(
            module.logical_axes("layers"), is_leaf=lambda x: isinstance(x, tuple)
        )
        split = [math.prod(a.shape) for a, n in zip(shapes, names) if MODEL_SHARDED & set(n)]
        halves = [
            dim % 2 == 0
            for a, n in zip(shapes, names)
            for dim, name in zip(a.shape, n)
            if name in MODEL_SHARDED
        ]
        assert all(halves)
        return sum(split) / count(module, "layers")

    modules = build("nano").modules
    assert modules["vision"].freeze_groups["exit"] == "connector"
    assert all(share(m) > 0.95 for m in modules.values())


def test_what_the_data_must_look_like():
    tiny = build("tiny")
    assert (tiny.tile_px, tiny.patches_per_tile, tiny.tokens_per_tile) == (48, 36, 9)
    ov = build("llava-ov-7b")
    assert (ov.tile_px, ov.patches_per_tile, ov.tokens_per_tile) == (384, 729, 729)
    spec = ov.modules["llm"].field_spec("visual", 2, 5)
    assert (spec.shape, spec.dtype) == ((2, 5, 3584), jnp.float32)


@pytest.mark.parametrize("size", ["huge", "nano+huge", "huge+nano", "nano+", ""])
def test_unknown_size_lists_the_known(size):
    with pytest.raises(ValueError, match="llava-ov-7b"):
        build(size)


def test_any_tower_joins_any_decoder():
    assert build("siglip-6b+llama3-8b").size.vision.width == 2304


def test_bad_dtype_and_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="float64"):
        build("nano", "float64")
    with pytest.raises(ValueError, match="merge"):
        VisionSize(32, 8, 32, 2, 4, 64, merge=3)
    with pytest.raises(ValueError, match="heads"):
        DecoderSize(32, 2, 4, 3, 64, 100)


# Head width 64, so that the softmax is small beside the products; 4 x 4 patches and merge 2.
BIG_VISION = VisionSize(64, 4, 256, 2, 4, 512, merge=2)
BIG_DECODER = DecoderSize(256, 2, 4, 2, 512, 1000)


@pytest.mark.parametrize("items, tokens", [(1, 64), (2, 256)])
def test_flops_as_counted_by_hand(items, tokens):
    llm = DecoderModule(BIG_DECODER, F32)
    n = items * tokens
    assert llm.flops("entry", items, tokens) == 0
    assert llm.flops("exit", items, tokens) == 2 * n * 256 * 1000
    projections = 2 * n * 256 * (256 + 128 + 128 + 256)
    scores = items * 4 * 2 * (2 * tokens * tokens * 64)
    mlp = 3 * 2 * n * 256 * 512
    assert llm.flops("layers", items, tokens) == projections + scores + mlp

    vision = VisionModule(BIG_VISION, 128, F32)
    patches = 256 * items
    assert vision.flops("entry", items, 1) == 2 * patches * 48 * 256
    assert vision.flops("layers", items, 1) == (
        4 * 2 * patches * 256 * 256 + 2 * 2 * patches * 256 * 512 + items * 8 * 2 * 256 * 256 * 64
    )
    assert vision.flops("exit", items, 1) == 2 * (patches // 4) * (1024 * 128 + 128 * 128)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "module",
    [VisionModule(BIG_VISION, 128, F32), DecoderModule(BIG_DECODER, F32)],
    ids=["vision", "llm"],
)
def test_flops_near_what_xla_counts(module, part):
    tokens = 256
    batch = fields(module, 1, tokens)
    x = jnp.zeros((1, tokens, 256), jnp.float32)
    run = {
        "entry": lambda p, x: module.entry(p, batch),
        "layers": lambda p, x: module.layer(p, x, batch),
        "exit": lambda p, x: module.exit(p, x, batch),
    }[part]
    compiled = jax.jit(run).lower(specs(module, part), x).compile()
    matrices = module.flops(part, 1, tokens)
    elementwise = 50 * x.size  # norms, positions, masks: not counted
    cost = compiled.cost_analysis()
    assert cost is not None
    np.testing.assert_allclose(cost["flops"], matrices, rtol=0.05, atol=elementwise)


def test_no_items_cost_nothing():
    for module in build("nano").modules.values():
        assert all(module.flops(part, 0, 8) == 0 for part in PARTS)
