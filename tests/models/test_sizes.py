"""Sizes against published parameter counts, FLOPs against XLA's, and the shape of the contract."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import PARTS, fields

from dflop_jax.contract import (
    MODEL_SHARDED,
    MultimodalModel,
    attention_flops_of,
    content_flops_of,
    edges_of,
    taps_of,
)
from dflop_jax.data.content import features_per_row
from dflop_jax.profile.traced_parts import TraceSpec, forward_flops
from dflop_jax.records import Shape
from models import internvl, omni, qwen2_audio, qwen3_vl
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.llava import build
from models.qwen3_vl_sizes import QWEN3_VL
from models.sizes import (
    DECODERS,
    INTERNVL,
    LLAVA,
    OMNI,
    QWEN2_AUDIO,
    AudioSize,
    DecoderSize,
    VisionSize,
)
from models.vit import VisionModule

F32 = jnp.dtype("float32")
NANO = ("nano", "internvl-nano", "qwen3-vl-nano", "qwen2-audio-nano", "omni-nano")
OF_PARTS = "internvit-nano+whisper-nano+nano"
FACTORIES = {build: LLAVA, internvl.build: INTERNVL, qwen3_vl.build: QWEN3_VL,
             qwen2_audio.build: QWEN2_AUDIO, omni.build: (*OMNI, OF_PARTS)}  # fmt: skip
BUILD = {name: factory for factory, names in FACTORIES.items() for name in names}
BUILD = {name: BUILD[name] for name in (*NANO, OF_PARTS, *BUILD)}


@functools.cache
def specs(module, part):
    return jax.eval_shape(lambda key: module.init(part, key), jax.random.key(0))


def count(module, part):
    return sum(math.prod(a.shape) for a in jax.tree.leaves(specs(module, part)))


def n_params(module):
    return sum(count(module, p) * (module.n_layers if p == "layers" else 1) for p in module.inputs)


def n_model(model):
    return sum(n_params(module) for module in model.modules.values())


# Of decoders alone, safetensors totals of whole models, and Qwen3-32B of Qwen3-VL's.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llava-ov-0.5b": 893_618_208,  # with the line separator and a norm that no feature passes
    "llava-ov-7b": 8_030_348_832,
    "qwen2-audio-7b": 8_397_094_912,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name):
    if name in DECODERS:
        found = n_params(DecoderModule(DECODERS[name], F32))
    else:
        model = BUILD[name](name)
        found = n_model(model) + sum(math.prod(u.shape) for u in model.weights.unused)
    assert found == PUBLISHED[name]


@pytest.mark.slow(first=8)
@pytest.mark.parametrize("name", BUILD)
def test_every_size_fits_the_contract(name):
    model: MultimodalModel = BUILD[name](name, "bfloat16")
    vision, llm = model.modules.get("vision"), model.modules["llm"]
    assert model.vocab_size == model.size.decoder.vocab
    assert llm.field_spec("visual", 2, 5).shape == (2, 5, model.size.decoder.width)
    for module in model.modules.values():
        assert set(module.inputs) == set(module.freeze_groups) == {*PARTS, *taps_of(module)}
        for part in module.inputs:
            arrays = specs(module, part)
            names = module.logical_axes(part)
            ranks = jax.tree.map(len, names, is_leaf=lambda x: isinstance(x, tuple))
            assert ranks == jax.tree.map(lambda a: a.ndim, arrays)
            assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(arrays))
    if model.piece_tokens:
        assert set(model.piece_tokens) == set(model.preprocessing) == set(model.modules) - {"llm"}
        return
    # Rows are packed, at native resolution.
    assert set(vision.taps) == set(llm.inlets) == {e.tap for e in edges_of(model)} - {""}
    for edge in edges_of(model):
        assert features_per_row(vision, edge, Shape(2, 64)) == 16
    assert vision.field_spec("patches", 1, 8).shape == (1, 8, model.size.vision.patch_values)
    assert llm.field_spec("positions", 2, 64).shape == (2, 64, 3)


def test_layers_split_over_the_model_axis():
    def share(module):
        names = module.logical_axes("layers")
        names = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
        pairs = list(zip(jax.tree.leaves(specs(module, "layers")), names, strict=True))
        dims = [d for a, n in pairs for d, name in zip(a.shape, n) if name in MODEL_SHARDED]
        assert not any(d % 2 for d in dims)
        split = sum(math.prod(a.shape) for a, n in pairs if MODEL_SHARDED & {*n})
        return split / count(module, "layers")

    modules = [*build("nano").modules.values(), internvl.build().modules["vision"],
               qwen2_audio.build().modules["audio"]]  # fmt: skip
    assert all(share(m) > 0.95 for m in modules)


@pytest.mark.parametrize("size", ["huge", "nano+huge", "huge+nano", "nano+", ""])
def test_unknown_size_lists_the_known(size):
    known = {build: "llava-ov-7b", internvl.build: r"internvl-2\.5-4b",
             qwen2_audio.build: "qwen2-audio-7b", qwen3_vl.build: "qwen3-vl-8b"}  # fmt: skip
    for factory, name in known.items():
        with pytest.raises(ValueError, match=name):
            factory(size)


@pytest.mark.parametrize("make, match", [
    (lambda: build("nano", "float64"), "float64"),
    (lambda: VisionSize(32, 8, 32, 2, 4, 64, merge=3), "merge"),
    (lambda: VisionSize(32, 8, 32, 2, 4, 64, qk_norm=True), "siglip"),
    (lambda: AudioSize(30, 8, 32, 2, 4, 64), "frames"),
    (lambda: DecoderSize(32, 2, 4, 3, 64, 100), "heads"),
])  # fmt: skip
def test_bad_dtype_and_bad_sizes_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# Head width 64, so that the softmax is small beside the products; 4 x 4 patches and merge 2.
BIG_VISION = VisionSize(64, 4, 256, 2, 4, 512, merge=2)
BIG_INTERN = VisionSize(
    64, 4, 256, 2, 4, 512, merge=2, post_norm=False, form="internvit", qk_norm=True
)
BIG_AUDIO = AudioSize(512, 32, 256, 2, 4, 512)
BIG_DECODER = DecoderSize(256, 2, 4, 2, 512, 1000)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_attention_needs_the_pairs_that_see_each_other(tokens):
    pairs = sum(1 for i in range(tokens) for j in range(tokens) if j <= i)
    llm, vision = DecoderModule(BIG_DECODER, F32), VisionModule(BIG_VISION, 128, F32)
    assert attention_flops_of(llm)(tokens) == pairs * 4 * (2 * 64 + 2 * 64)
    assert attention_flops_of(vision)(tokens) == tokens**2 * 4 * (2 * 64 + 2 * 64)


def test_pairs_cost_something_where_a_kernel_skips_the_others():
    """All pairs of a whole row come to the scores of a layer; of a causal kernel to half."""
    for kernel, share in (("xla", 0.0), ("pallas", 0.5)):
        llm = content_flops_of(DecoderModule(BIG_DECODER, F32, attention_kernel=kernel))
        assert llm.get("pair", 0.0) * 96**2 == share * 4 * 2 * (2 * 96 * 96 * 64)
    for kernel, share in (("xla", 0.0), ("pallas", 1.0)):
        vision = content_flops_of(VisionModule(BIG_VISION, 128, F32, attention_kernel=kernel))
        assert vision.get("pair", 0.0) * 256**2 == share * 8 * 2 * 256 * 256 * 64


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "module",
    [
        VisionModule(BIG_VISION, 128, F32),
        VisionModule(BIG_INTERN, 128, F32),
        AudioModule(BIG_AUDIO, 128, F32),
        DecoderModule(BIG_DECODER, F32),
    ],
    ids=["vision", "internvit", "audio", "llm"],
)
def test_flops_near_what_xla_counts(module, part):
    tokens = 256
    batch = fields(module, 1, tokens)
    rows = getattr(module.size, "tokens_in_tower", tokens)
    x = jnp.zeros((1, rows, 256), jnp.float32)
    run = {
        "entry": lambda p, x: module.entry(p, batch),
        "layers": lambda p, x: module.layer(p, x, batch),
        "exit": lambda p, x: module.exit(p, x, batch),
    }[part]
    compiled = jax.jit(run).lower(specs(module, part), x).compile()
    matrices = forward_flops(TraceSpec(module, part, Shape(1, tokens)))
    # Norms, positions, masks, and GELUs (of the audio's stem at every frame): not counted.
    elementwise = (150 if isinstance(module, AudioModule) else 50) * x.size
    cost = compiled.cost_analysis()
    assert cost is not None
    np.testing.assert_allclose(cost["flops"], matrices, rtol=0.05, atol=elementwise)
