"""Outputs and every gradient against transformers, for random small configurations."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import (
    check,
    features,
    logits,
    placed,
    randomise,
    text_batch,
    torch,
    transformers,
)
from model_fields import forward

from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.compose import compose
from dflop_jax.data.media.internvl_tiles import DynamicTiling
from dflop_jax.data.media.mel import encoder_tokens
from dflop_jax.data.text.pieces import TextPiece
from models import hf
from models.composed import Published
from models.decoder import DecoderModule
from models.processors import MEAN, STD
from models.sizes import AudioSize, DecoderSize, ModelSize, VisionSize
from models.vit import VisionModule
from tests.data import views

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


def draw_vision(rng, form, merge):
    patch, heads = int(rng.integers(2, 6)), int(rng.integers(1, 5))
    grid = merge * int(rng.integers(1, 4))
    spare = int(rng.integers(0, patch)) if merge == 1 else 0
    intern = {}
    if form == "internvit":
        six = bool(rng.random() < 0.5)
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


def draw_text(rng, size, n_media, special):
    """Token rows of which two or three contain in all `n_media[i]` special tokens in a row."""
    rows = int(rng.integers(1, 4))
    parts = [[] for _ in range(rows)]
    for i, n in enumerate(n_media):
        # In the order of the rows, as the reference takes the features.
        row = parts[i * rows // len(n_media)]
        row += [*rng.integers(1, size.vocab, int(rng.integers(1, 4))), *[special] * n]
    longest = max(map(len, parts)) + 2
    return np.stack([[*p, *rng.integers(1, size.vocab, longest - len(p))] for p in parts])


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


@pytest.mark.parametrize("form", ["siglip", "internvit"])
def test_tower_alone(form):
    """The tower of a folder of its own, within a module that has a connector too."""
    rng = np.random.default_rng(7)
    size = draw_vision(rng, form, merge=1 if form == "siglip" else 2)
    module = VisionModule(size, 8, F32)
    map_ = hf.tower(module)
    siglip, intern = transformers.SiglipVisionModel, transformers.InternVLVisionModel
    model = reference(map_, siglip if form == "siglip" else intern, 7)
    pixels = draw_tiles(rng, size, 2)
    mean, std = (0.5, 0.5) if form == "siglip" else (MEAN, STD)
    out = model(pixel_values=normed(pixels, mean, std), output_hidden_states=True)
    batch = {"pixels": jnp.asarray(pixels)}

    check(map_, model, out.hidden_states[-1], lambda p: forward(module, p["vision"], batch), form)


# The media of each row: pictures alone, together and beside a clip, a clip alone.
ROWS = (("image",), ("image", "image"), ("image", "video"), ("video",))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("seed", SEEDS)
def test_llava_onevision(seed):
    """Pictures of odd aspect ratios (unpadded grids, downscaling, line ends), several pictures and
    pooled clips; with every gradient, that of the line end too."""
    rng = np.random.default_rng(50 + seed)
    decoder = draw_decoder(rng, qkv_bias=seed != 1)
    size = ModelSize(decoder, draw_vision(rng, "siglip", merge=1), layout="anyres")
    model_ours = Published(size, F32)
    vision, llm = model_ours.modules["vision"], model_ours.modules["llm"]
    map_ = model_ours.weights
    model = reference(map_, transformers.LlavaOnevisionForConditionalGeneration, 50 + seed)
    px, grid = size.vision.tile_px, size.vision.grid
    grids = tuple((px * r, px * c) for r in range(1, 4) for c in range(1, 4))
    spec = AnyRes(px, grid, 2 + 2 * seed, grids)
    config = model.config
    config.image_grid_pinpoints = [list(g) for g in grids]
    config.image_token_id, config.video_token_id = 0, 1
    config.vision_aspect_ratio = f"anyres_max_{spec.max_tiles}"

    frames, rows, pictures, clips = 2 + seed, [], [], []
    for kinds in ROWS:
        media, alone = [], kinds.count("image") == 1
        for kind in kinds:
            if kind == "video":
                tiles, sources = draw_tiles(rng, size.vision, frames), spec.place_clip(frames)
                clips.append(normed(tiles, 0.5, 0.5))
            else:
                wh = rng.integers(px // 2 + 1, 9 * px, 2)
                (usable,), (n,), _ = spec.count(*wh[:, None], np.array([alone]))
                assert usable
                tiles, sources = draw_tiles(rng, size.vision, n), spec.place(*map(int, wh), alone)
                pictures.append((wh[::-1], normed(tiles, 0.5, 0.5)))
            assert len(sources) == spec.count_clips(frames) or kind == "image"
            media.append(views.pictures(tiles, sources, grid**2))
        rows.append(media)
    longest = max(sum(len(m.tokens) for _, m in media) for media in rows) + 5
    what = views.prepared(spec)
    samples, tokens = [], np.zeros((len(rows), longest), np.int64)
    for k, media in enumerate(rows):
        spare = longest - sum(len(m.tokens) for _, m in media)
        cuts = [0, *np.sort(rng.integers(1, spare, len(media))), spare]
        text = [TextPiece(tuple(rng.integers(2, decoder.vocab, n))) for n in np.diff(cuts)]
        pieces = [p for j in range(len(media)) for p in (text[j], TextPiece(medium=j))]
        samples.append(compose([*pieces, text[-1]], dict(enumerate(media)), what, placeholder=-1))
        tokens[k] = samples[-1].fields["llm"]["tokens"]
        kind = np.repeat([k == "video" for k in ROWS[k]], [len(m.tokens) for _, m in media])
        tokens[k][tokens[k] < 0] = kind

    most = max(len(p) for _, p in pictures)
    padded = [torch.nn.functional.pad(p, (0,) * 7 + (most - len(p),)) for _, p in pictures]
    want = model(
        input_ids=torch.from_numpy(tokens),
        pixel_values=torch.stack(padded),
        image_sizes=torch.from_numpy(np.stack([wh for wh, _ in pictures])),
        batch_num_images=torch.tensor([n for n in (r.count("image") for r in ROWS) if n]),
        pixel_values_videos=torch.stack(clips),
    ).logits

    pixels = [s.fields["vision"]["pixels"] for s in samples]
    tiles = jnp.asarray(np.concatenate(pixels))
    first = np.cumsum([0, *map(len, pixels[:-1])]) * grid**2
    places = [s.places["vision", "llm"] for s in samples]
    index = np.concatenate([p.index + at for p, at in zip(places, first, strict=True)])
    weight = np.concatenate([p.weight for p in places])[..., None]
    used, lines = (np.stack([s.fields["llm"][n] for s in samples])
                   for n in ("is_visual", "is_newline"))  # fmt: skip

    def ours(p):
        found = features(vision, p["vision"], {"pixels": tiles})
        seen = found.reshape(-1, found.shape[-1])[index] * weight
        visual = seen.sum(1).reshape(*tokens.shape, -1)
        batch = text_batch(tokens, visual, used)
        return logits(llm, p["llm"], batch | {"is_newline": jnp.asarray(lines)})

    check(map_, model, want, ours, f"llava {seed}")


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("seed", SEEDS)
def test_internvl(seed):
    """Three pictures of odd aspect ratios, tiled, in one row or several."""
    rng = np.random.default_rng(20 + seed)
    decoder = draw_decoder(rng, qkv_bias=seed != 1)
    vision_size = draw_vision(rng, "internvit", merge=2)
    six = seed == 1  # at least once each
    vision_size = dataclasses.replace(vision_size, qkv_bias=not six, qk_norm=six, rms_norm=six)
    model_ours = Published(ModelSize(decoder, vision_size, layout="dynamic"), F32)
    vision, llm = model_ours.modules["vision"], model_ours.modules["llm"]
    map_ = model_ours.weights
    model = reference(map_, transformers.InternVLForConditionalGeneration, seed)
    model.config.image_token_id = 0
    px = vision_size.tile_px
    spec = DynamicTiling(px, max_tiles=3, tokens_per_tile=vision_size.tokens_per_tile)
    _, n_tiles, n_tokens = spec.count(*rng.integers(1, 6 * px, (2, 3)), np.zeros(3, bool))
    pixels = draw_tiles(rng, vision_size, n_tiles.sum())
    tokens = draw_text(rng, decoder, n_tokens.tolist(), 0)
    mask = tokens == 0
    want = model(input_ids=torch.from_numpy(tokens), pixel_values=normed(pixels, MEAN, STD)).logits

    def ours(p):
        found = features(vision, p["vision"], {"pixels": jnp.asarray(pixels)})
        return logits(llm, p["llm"], text_batch(tokens, placed(found, mask), mask))

    check(map_, model, want, ours, f"internvl {seed}")


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("seed", SEEDS)
def test_qwen2_audio(seed):
    """Several chunks of different lengths, the shortest a few frames."""
    rng = np.random.default_rng(30 + seed)
    decoder = draw_decoder(rng, qkv_bias=seed != 1, tied=False)
    heads = int(rng.integers(1, 4))
    audio_size = AudioSize(
        frames=4 * int(rng.integers(3, 8)),
        mel_bins=int(rng.integers(3, 9)),
        width=4 * heads * int(rng.integers(1, 4)),
        n_layers=int(rng.integers(1, 4)),
        n_heads=heads,
        mlp=int(rng.integers(10, 50)),
    )
    model_ours = Published(ModelSize(decoder, audio=audio_size), F32)
    audio, llm = model_ours.modules["audio"], model_ours.modules["llm"]
    map_ = model_ours.weights
    model = reference(map_, transformers.Qwen2AudioForConditionalGeneration, seed)
    model.config.audio_token_id = 0
    frames = np.asarray([audio_size.frames, 7, 3, int(rng.integers(4, audio_size.frames))])
    mel = rng.normal(size=(4, audio_size.mel_bins, audio_size.frames)).astype(np.float32)
    used = encoder_tokens(frames)
    tokens = draw_text(rng, decoder, used, 0)
    mask = tokens == 0
    real = np.arange(audio_size.frames) < frames[:, None]
    want = model(
        input_ids=torch.from_numpy(tokens),
        attention_mask=torch.ones(tokens.shape, dtype=torch.long),
        input_features=torch.from_numpy(mel),
        feature_attention_mask=torch.from_numpy(real.astype(np.int64)),
    ).logits

    def ours(p):
        batch = {"mel": jnp.asarray(mel), "mel_frames": jnp.asarray(frames, jnp.int32)}
        found = features(audio, p["audio"], batch)
        return logits(llm, p["llm"], text_batch(tokens, placed(found, mask, used), mask))

    check(map_, model, want, ours, f"qwen2-audio {seed}")
