"""The models whose logits and gradients are compared with stored ones of transformers, and the
numbers that are stored of an array: products with random vectors, which every entry is in."""

import dataclasses
import hashlib
import json
from pathlib import Path
from zlib import crc32

import numpy as np
from model_fields import forward

from dflop_jax.data.datasets.clips import clip_format_of
from dflop_jax.weights import to_file_layout
from dflop_jax.weights.contract import group_by_name
from models import gemma, gemma4, hf, internvl, llava, qwen2_audio, qwen3_5, qwen3_vl, wan
from models.composed import PublishedComposition
from models.decoder import DecoderModule
from models.sizes import DECODERS, VISION, ModelSize

FILE = Path(__file__).parent / "reference.npz"
SEED = 1
F32 = np.dtype(np.float32)
N_VECTORS = 3  # random vectors that an array is multiplied by

# What the named sizes have none of: a Llama, whose heads do not divide its width, with the tower of
# InternVL's 6B.
LLAMA = dataclasses.replace(
    DECODERS["nano"], width=48, n_heads=6, n_kv_heads=2, vocab=90, qkv_bias=False, tied=False,
    rope_theta=5e5, norm_eps=1e-5,
)  # fmt: skip
SIX_B = dataclasses.replace(VISION["internvit-nano"], qkv_bias=False, qk_norm=True, rms_norm=True)
MODELS = {
    "llava_onevision": lambda: llava.build("anyres-nano"),
    "internvl": lambda: internvl.build("internvl-nano"),
    "internvl of Llama": lambda: PublishedComposition(
        ModelSize(LLAMA, SIX_B, layout="dynamic"), F32
    ),
    "qwen2_audio": lambda: qwen2_audio.build("qwen2-audio-nano"),
    "qwen3_vl": lambda: qwen3_vl.build("qwen3-vl-nano"),
    "qwen3_5": lambda: qwen3_5.build("qwen3.5-nano"),
    "qwen3_5_text": lambda: qwen3_5.build_text("qwen3.5-text-nano"),
    "gemma3": lambda: gemma.build("gemma3-nano"),
    "gemma3_text": lambda: gemma.build_text("gemma3-text-nano"),
    "gemma4": lambda: gemma4.build("gemma4-nano"),
    "gemma4_text": lambda: gemma4.build_text("gemma4-text-nano"),
}
# Sizes whose names and shapes of tensors are compared, and the class of transformers.
PUBLISHED = {
    "llava-ov-7b": (llava.build, "LlavaOnevisionForConditionalGeneration"),
    "internvl-2.5-1b": (internvl.build, "InternVLForConditionalGeneration"),
    "internvl-2.5-38b": (internvl.build, "InternVLForConditionalGeneration"),
    "qwen2-audio-7b": (qwen2_audio.build, "Qwen2AudioForConditionalGeneration"),
    "qwen3-vl-2b": (qwen3_vl.build, "Qwen3VLForConditionalGeneration"),
    "qwen3-vl-32b": (qwen3_vl.build, "Qwen3VLForConditionalGeneration"),
    "qwen2.5-0.5b": (None, "Qwen2ForCausalLM"),
    "qwen2.5-72b": (None, "Qwen2ForCausalLM"),
    "llama3-70b": (None, "LlamaForCausalLM"),
}


def published_map(name):
    """The weight map of a published size: of a whole model, or of a decoder alone."""
    build, _ = PUBLISHED[name]
    return build(name).weights if build else hf.decoder_weights(DecoderModule(DECODERS[name], F32))


def digest(shapes):
    """SHA-256 of {name: shape} of tensors."""
    return hashlib.sha256(json.dumps(sorted(map(list, shapes.items()))).encode()).hexdigest()


def project(array, key):
    """Products [..., N_VECTORS] of the last dim with random vectors, and the largest entry."""
    array = np.asarray(array, np.float64)
    rng = np.random.default_rng(crc32(key.encode()))
    return array @ rng.normal(size=(array.shape[-1], N_VECTORS)), np.abs(array).max()


def project_gradients(gradients):
    """[tensors, N_VECTORS + 1] of arrays by name, in the order of their names; the last column is
    the largest entry."""
    rows = []
    for name in sorted(gradients):
        products, largest = project(gradients[name].reshape(-1), name)
        rows.append([*products, largest])
    return np.array(rows)


def gradients_by_tensor(map_, gradients):
    """Gradients of parameters as the tensors of a file, by name."""
    by_tensor = {}
    for name, parts in group_by_name(map_.tensors).items():
        arrays = []
        for t in parts:
            leaf = gradients[t.module][t.part]
            for key in t.path:
                leaf = leaf[key]
            arrays.append(to_file_layout(t, leaf, t.layer, F32))
        by_tensor[name] = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    return by_tensor


# ---- text to video ----

WAN = wan.build("nano+wan-nano")
GENERATOR, FORM = WAN.generator, clip_format_of(WAN)
N_TEXT, LATENTS, TIME = 5, (4, 3, 4, 6), 0.37  # LATENTS: channels, time, rows, columns


def clip_values():
    """(latents, target, text states) of a clip."""
    rng = np.random.default_rng(1)
    latents, target = (rng.normal(size=LATENTS).astype(np.float32) for _ in range(2))
    return latents, target, rng.normal(size=(N_TEXT, GENERATOR.size.text_width)).astype(np.float32)


def clip_row():
    """(fields of a row of one clip and its caption, tokens before its patches)."""
    latents, target, text = clip_values()
    grid = FORM.grid(LATENTS)
    tokens = FORM.tokens(N_TEXT, grid)
    before = tokens - int(np.prod(grid))
    text_padding = ((FORM.time_tokens, tokens - FORM.time_tokens - N_TEXT), (0, 0))
    batch = {
        **FORM.fields(N_TEXT, grid),
        "latents": np.pad(FORM.patches(latents), ((before, 0), (0, 0))),
        "target": np.pad(FORM.patches(target), ((before, 0), (0, 0))),
        "time": np.full(tokens, 1000 * TIME, np.float32),
        "text": np.pad(text, text_padding),
        "segment_ids": np.ones(tokens, np.int32),
    }
    return {name: a[None] for name, a in batch.items()}, before


def clip_loss(params, text, batch):
    """(mean loss of the patches, velocities [tokens, values])."""
    batch = {**batch, "text": text}
    x = forward(GENERATOR, params, batch)
    loss = GENERATOR.exit(params["exit"], x, batch)["loss_sum"] / batch["weights"].sum()
    return loss, GENERATOR.velocity(params["exit"], x, batch)[0]
