"""Sizes against published parameter counts, FLOPs against XLA's, and the shape of the contract."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import PARTS, fields
from PIL import Image

from dflop_jax.contract import (
    MODEL_SHARDED,
    MultimodalModel,
    attention_flops_of,
    content_flops_of,
    edges_of,
    taps_of,
)
from dflop_jax.data import MediaSpec
from dflop_jax.data.features import features_per_row
from dflop_jax.data.media.compose import compose
from dflop_jax.data.media.decode import decode_opened
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import module_of
from dflop_jax.data.text.pieces import TextPiece
from dflop_jax.profile.parts import forward_flops
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
    VISION,
    AudioSize,
    DecoderSize,
    VisionSize,
)
from models.vit import VisionModule

F32 = jnp.dtype("float32")


@functools.cache
def specs(module, part):
    return jax.eval_shape(lambda key: module.init(part, key), jax.random.key(0))


def count(module, part):
    return sum(math.prod(a.shape) for a in jax.tree.leaves(specs(module, part)))


def n_params(module):
    return sum(count(module, p) * (module.n_layers if p == "layers" else 1) for p in module.inputs)


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


def n_model(model):
    return sum(n_params(module) for module in model.modules.values())


def test_llava_onevision_parameters_as_published():
    """Safetensors totals of lmms-lab/llava-onevision-qwen2-0.5b-ov and -7b-ov; they include the
    line separator and a final norm of the tower that the features do not pass."""
    for name, published in (("llava-ov-0.5b", 893_618_208), ("llava-ov-7b", 8_030_348_832)):
        model = build(name)
        unused = sum(math.prod(u.shape) for u in model.weights.unused)
        assert n_model(model) + unused == published


@pytest.mark.parametrize(
    "name, parts",
    [
        # Millions, as public notes on InternVL2.5 list ViT, LLM and sum ...
        ("internvl-2.5-1b", ("304.01", "629.70", "938.19")),
        ("internvl-2.5-4b", ("304.01", "3.40e3", "3.71e3")),
        # ... and the total of InternVL3-78B, which has the same two parts.
        ("internvl-2.5-78b", (None, None, "78.41e3")),
    ],
)
def test_internvl_parameters_as_published(name, parts):
    model = internvl.build(name)
    vision, llm = model.modules["vision"], model.modules["llm"]
    found = n_params(vision) - count(vision, "exit"), n_params(llm), n_model(model)
    for n, published in zip(found, parts, strict=True):
        if published:
            digits = len(published.partition("e")[0].partition(".")[2])
            unit = 10 ** (6 + int(published.partition("e")[2] or 0))
            assert round(n / unit, digits) == float(published.partition("e")[0])


def test_internvl_38b_is_made_of_published_parts():
    """No total was found for it: the tower of the 78B, and Qwen2.5-32B of a smaller vocabulary."""
    model, larger = internvl.build("internvl-2.5-38b"), internvl.build("internvl-2.5-78b")
    assert model.size.vision == larger.size.vision
    fewer_rows = 2 * (152_064 - 151_674) * 5120
    assert n_params(model.modules["llm"]) == 32_763_876_352 - fewer_rows


def test_qwen2_audio_parameters_as_published():
    """The safetensors total of Qwen/Qwen2-Audio-7B."""
    assert n_model(qwen2_audio.build("qwen2-audio-7b")) == 8_397_094_912


@pytest.mark.parametrize(
    "name, published",
    [
        # Safetensors totals of Qwen/Qwen3-VL-2B-, 4B- and 8B-Instruct.
        ("qwen3-vl-2b", 2_127_532_032),
        ("qwen3-vl-4b", 4_437_815_808),
        ("qwen3-vl-8b", 8_767_123_696),
    ],
)
def test_qwen3_vl_parameters_as_published(name, published):
    assert n_model(qwen3_vl.build(name)) == published


def test_qwen3_vl_32b_is_made_of_published_parts():
    """Qwen3-32B, and the tower of the 8B; mergers end in the decoder's width."""
    model, smaller = qwen3_vl.build("qwen3-vl-32b"), qwen3_vl.build("qwen3-vl-8b")
    assert n_params(model.modules["llm"]) == 32_762_123_264
    assert model.size.vision == smaller.size.vision
    assert model.modules["vision"].out_width == 5120


@pytest.mark.parametrize("name", QWEN3_VL)
def test_every_native_size_fits_the_contract(name):
    model: MultimodalModel = qwen3_vl.build(name, "bfloat16")
    assert list(model.modules) == ["vision", "llm"]
    assert not model.piece_tokens  # rows are packed
    vision, llm = model.modules.values()
    assert set(vision.taps) == set(llm.inlets) == {e.tap for e in edges_of(model)} - {""}
    for edge in edges_of(model):
        assert features_per_row(vision, edge, Shape(2, 64)) == 16
        assert llm.field_spec(edge.name, 2, 64).shape == (2, 64, model.size.decoder.width)
    assert vision.field_spec("patches", 1, 8).shape == (1, 8, model.size.vision.patch_values)
    assert llm.field_spec("positions", 2, 64).shape == (2, 64, 3)
    check_modules(model)


@pytest.mark.parametrize("name", QWEN2_AUDIO)
def test_every_audio_size_fits_the_contract(name):
    model = qwen2_audio.build(name, "bfloat16")
    assert list(model.modules) == ["audio", "llm"]
    assert model.vocab_size == QWEN2_AUDIO[name].decoder.vocab
    check_modules(model)
    check_preprocessing(model)


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("name", [*LLAVA, *INTERNVL])
def test_every_size_fits_the_contract(name):
    factory = internvl.build if name in INTERNVL else build
    model: MultimodalModel = factory(name, "bfloat16")
    assert list(model.modules) == ["vision", "llm"]
    assert model.vocab_size == (LLAVA | INTERNVL)[name].decoder.vocab
    vision = model.size.vision
    assert 1 <= vision.tokens_per_tile <= model.piece_tokens["vision"] <= vision.tile_px**2
    check_modules(model)
    check_preprocessing(model)


@pytest.mark.parametrize("name", [*OMNI, "internvit-nano+whisper-nano+nano"])
def test_every_omni_size_fits_the_contract(name):
    model: MultimodalModel = omni.build(name, "bfloat16")
    assert list(model.modules) == ["vision", "audio", "llm"]
    check_modules(model)
    check_preprocessing(model)


def check_preprocessing(model):
    """What the data prepares is what the encoders take and give."""
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    assert set(model.piece_tokens) == set(model.preprocessing) == set(model.modules) - {"llm"}
    how = spec.prepared(Limits())
    media, sample = drawn(how)
    assert sample.load.tokens("llm") == 1 + sum(len(m.tokens) for _, m in media.values())
    edges = {e.source: e for e in edges_of(model)}
    for name, tokens in model.piece_tokens.items():
        module = model.modules[name]
        wanted = {n for names in module.inputs.values() for n in names}
        (decoded,) = (m for owner, m in media.values() if owner == name)
        pieces = len(decoded.lengths)
        assert sample.load.lengths(name) == decoded.lengths == (tokens,) * pieces
        fields = {n: module.field_spec(n, pieces, tokens) for n in wanted}
        assert {n: (a.shape, a.dtype) for n, a in sample.fields[name].items()} == {
            n: (f.shape, f.dtype) for n, f in fields.items()
        }
        hidden = jax.eval_shape(module.entry, specs(module, "entry"), fields)
        assert hidden.shape[:2] == (pieces, tokens)
        per_row = features_per_row(module, edges[name], Shape(pieces, tokens))
        assert per_row * pieces == decoded.features
    newline = "image_newline" in specs(model.modules["llm"], "entry")
    assert newline == any(medium.sources > 1 for medium in how.values())


class Silence:
    """A black clip and a sound of silence, as files are opened."""

    def spread(self, n, convert):
        return np.stack([convert(Image.new("RGB", (8, 8)))] * n)

    def __call__(self, n_samples, rate_hz):
        return np.zeros(n_samples, np.float32)


def drawn(how):
    """A clip of two tiles and a sound, of those that are taken, and a sample of them."""
    headers = {"video": {"frames": 2}, "audio": {"samples": 1000}}
    kinds = [kind for kind in headers if module_of(how, kind)]
    media = decode_opened([(kind, Silence(), headers[kind]) for kind in kinds], how)
    pieces = [TextPiece((1,)), *(TextPiece(medium=k) for k in range(len(media)))]
    return media, compose(pieces, media, how, placeholder=0)


def check_modules(model):
    for module in model.modules.values():
        assert set(module.inputs) == set(module.freeze_groups) == {*PARTS, *taps_of(module)}
        for part in module.inputs:
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
    assert share(internvl.build().modules["vision"]) > 0.95
    assert share(qwen2_audio.build().modules["audio"]) > 0.95


def test_what_the_data_must_look_like():
    tiny = build("tiny")
    assert (tiny.preprocessing["vision"]["tile_px"], tiny.piece_tokens) == (48, {"vision": 36})
    assert tiny.size.vision.tokens_per_tile == 9
    ov = build("llava-ov-7b")
    assert (ov.preprocessing["vision"]["tile_px"], ov.piece_tokens) == (384, {"vision": 729})
    assert ov.size.vision.tokens_per_tile == 729
    spec = ov.modules["llm"].field_spec("visual", 2, 5)
    assert (spec.shape, spec.dtype) == ((2, 5, 3584), jnp.float32)


@pytest.mark.parametrize("size", ["huge", "nano+huge", "huge+nano", "nano+", ""])
def test_unknown_size_lists_the_known(size):
    with pytest.raises(ValueError, match="llava-ov-7b"):
        build(size)
    with pytest.raises(ValueError, match=r"internvl-2\.5-4b"):
        internvl.build(size)
    with pytest.raises(ValueError, match="qwen2-audio-7b"):
        qwen2_audio.build(size)
    with pytest.raises(ValueError, match="qwen3-vl-8b"):
        qwen3_vl.build(size)


def test_any_tower_joins_any_decoder():
    assert build("siglip-6b+llama3-8b").size.vision.width == 2304
    assert internvl.build("internvit-6b+llama3-8b").size.vision.width == 3200
    assert qwen2_audio.build("whisper-large-v3+llama3-8b").size.audio.width == 1280


def test_bad_dtype_and_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="float64"):
        build("nano", "float64")
    with pytest.raises(ValueError, match="merge"):
        VisionSize(32, 8, 32, 2, 4, 64, merge=3)
    with pytest.raises(ValueError, match="siglip"):
        VisionSize(32, 8, 32, 2, 4, 64, qk_norm=True)
    with pytest.raises(ValueError, match="frames"):
        AudioSize(30, 8, 32, 2, 4, 64)
    with pytest.raises(ValueError, match="heads"):
        DecoderSize(32, 2, 4, 3, 64, 100)


# Head width 64, so that the softmax is small beside the products; 4 x 4 patches and merge 2.
BIG_VISION = VisionSize(64, 4, 256, 2, 4, 512, merge=2)
BIG_INTERN = VisionSize(
    64, 4, 256, 2, 4, 512, merge=2, post_norm=False, form="internvit", qk_norm=True
)
BIG_AUDIO = AudioSize(512, 32, 256, 2, 4, 512)
BIG_DECODER = DecoderSize(256, 2, 4, 2, 512, 1000)


@pytest.mark.parametrize("items, tokens", [(1, 64), (2, 128)])
def test_flops_as_counted_by_hand(items, tokens):
    """Up to 128 tokens causal attention is one block."""
    llm = DecoderModule(BIG_DECODER, F32)
    n, shape = items * tokens, Shape(items, tokens)
    assert forward_flops(llm, "entry", shape) == 0
    assert forward_flops(llm, "exit", shape) == 2 * n * 256 * 1000
    projections = 2 * n * 256 * (256 + 128 + 128 + 256)
    scores = items * 4 * 2 * (2 * tokens * tokens * 64)
    mlp = 3 * 2 * n * 256 * 512
    assert forward_flops(llm, "layers", shape) == projections + scores + mlp

    vision = VisionModule(BIG_VISION, 128, F32)
    patches, shape = 256 * items, Shape(items, 256)
    assert forward_flops(vision, "entry", shape) == 2 * patches * 48 * 256
    assert forward_flops(vision, "layers", shape) == (
        4 * 2 * patches * 256 * 256 + 2 * 2 * patches * 256 * 512 + items * 8 * 2 * 256 * 256 * 64
    )
    assert forward_flops(vision, "exit", shape) == 2 * (patches // 4) * (1024 * 128 + 128 * 128)


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
    matrices = forward_flops(module, part, Shape(1, tokens))
    # Norms, positions, masks, and GELUs (of the audio's stem at every frame): not counted.
    elementwise = (150 if isinstance(module, AudioModule) else 50) * x.size
    cost = compiled.cost_analysis()
    assert cost is not None
    np.testing.assert_allclose(cost["flops"], matrices, rtol=0.05, atol=elementwise)
