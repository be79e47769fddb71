"""Converts sizes to configurations of transformers, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from models.hf_config import DEFAULTS, Config, config_values, rules_for, size_fields, square_side
from models.qwen3_vl_sizes import NativeVisionSize, Qwen3VLSize
from models.sizes import AudioSize, DecoderSize, ModelSize, VisionSize

MROPE_KEY = "rope_parameters.mrope_section"
# Fields of sizes, and their config keys.
_STACK_KEYS = {
    "width": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "mlp": "intermediate_size",
}  # fmt: skip
DECODER_KEYS = {
    **_STACK_KEYS, "n_kv_heads": "num_key_value_heads", "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
}  # fmt: skip
TOWER_KEYS = {**_STACK_KEYS, "norm_eps": "layer_norm_eps"}
NATIVE_TOWER_KEYS = {
    **_STACK_KEYS, "n_layers": "depth", "n_heads": "num_heads", "patch_px": "patch_size",
    "frames": "temporal_patch_size", "merge": "spatial_merge_size",
}  # fmt: skip
AUDIO_KEYS = {
    "width": "d_model", "n_layers": "encoder_layers", "n_heads": "encoder_attention_heads",
    "mlp": "encoder_ffn_dim", "mel_bins": "num_mel_bins",
}  # fmt: skip

# ---- sizes to configurations ----


def decoder_config(s: DecoderSize, *, tie: bool = True) -> dict[str, Any]:
    """Return a decoder's configuration; without `tie` it omits whether the head is tied."""
    kind, name = "llama", "LlamaForCausalLM"
    if s.qkv_bias:
        kind, name = "qwen2", "Qwen2ForCausalLM"
    elif s.qk_norm:
        kind, name = "qwen3", "Qwen3ForCausalLM"
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [name],
        **config_values(s, DECODER_KEYS),
        "rope_parameters": {"rope_theta": s.rope_theta, "rope_type": "default"},
    }
    if not s.qkv_bias:
        config["head_dim"] = s.head_dim
    return config | ({"tie_word_embeddings": s.tied} if tie else {})


def qwen3_vl_text_config(s: DecoderSize) -> dict[str, Any]:
    """Return the configuration of the decoder in Qwen3-VL."""
    config = decoder_config(s, tie=False) | {"model_type": "qwen3_vl_text"}
    del config["architectures"]
    config["rope_parameters"] |= {
        "mrope_section": list(s.mrope_sections),
        "mrope_interleaved": True,
    }
    return config


def qwen3_vl_vision_config(s: NativeVisionSize, out_width: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl_vision",
        **config_values(s, NATIVE_TOWER_KEYS),
        "out_hidden_size": out_width,
        "num_position_embeddings": s.side**2,
        "deepstack_visual_indexes": list(s.deepstack),
    }


def vision_config(s: VisionSize) -> dict[str, Any]:
    config = config_values(s, TOWER_KEYS)
    if s.form == "siglip":
        size = {"image_size": s.tile_px, "patch_size": s.patch_px, "vision_use_head": False}
        return {"model_type": "siglip_vision_model", **config, **size}
    return {
        "model_type": "internvl_vision",
        **config,
        "image_size": [s.tile_px, s.tile_px],
        "patch_size": [s.patch_px, s.patch_px],
        "attention_bias": s.qkv_bias,
        "use_qk_norm": s.qk_norm,
        "norm_type": "rms_norm" if s.rms_norm else "layer_norm",
    }


def audio_config(s: AudioSize) -> dict[str, Any]:
    return {
        "model_type": "qwen2_audio_encoder",
        **config_values(s, AUDIO_KEYS),
        "max_source_positions": s.positions,
    }


# ---- configurations to sizes ----


def _int_list(c: Config, key: str) -> tuple[int, ...]:
    numbers = c[key]
    if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
        raise ValueError(f"{key} is {numbers!r}; it must be a list of integers")
    return tuple(numbers)


def _decoder_size(c: Config) -> DecoderSize:
    kind = c["model_type"]
    qwen3 = kind in ("qwen3", "qwen3_vl_text")
    return DecoderSize(
        **size_fields(c, DECODER_KEYS),
        rope_theta=float(c["rope_parameters.rope_theta"]),
        qkv_bias=kind == "qwen2",
        tied=c["tie_word_embeddings"],
        qk_norm=qwen3,
        head_size=c["head_dim"] if qwen3 else 0,
        mrope_sections=_int_list(c, MROPE_KEY) if MROPE_KEY in c else (),
    )


def vision_size(c: Config) -> VisionSize:
    """Return the size of a tower's complete configuration."""
    intern = c["model_type"] == "internvl_vision"
    return VisionSize(
        tile_px=square_side(c["image_size"]),
        patch_px=square_side(c["patch_size"]),
        **size_fields(c, TOWER_KEYS),
        merge=2 if intern else 1,
        post_norm=False,
        form="internvit" if intern else "siglip",
        qkv_bias=c["attention_bias"] if intern else True,
        qk_norm=intern and c["use_qk_norm"],
        rms_norm=intern and c["norm_type"] == "rms_norm",
    )


def _inner_config(config: Config, key: str, kind: str) -> dict[str, Any]:
    """Return a complete configuration inside another; its kind is `kind` if it names none."""
    inner = dict(config.get(key) or {})
    name = inner.get("model_type", kind)
    if name not in DEFAULTS:
        raise ValueError(f"{key}.model_type is {name!r}; known: {', '.join(DEFAULTS)}")
    return rules_for(name).read(inner)


def read_llava(config: Config) -> ModelSize:
    """Return the size of a LLaVA-OneVision configuration."""
    text = _inner_config(config, "text_config", "qwen2")
    text["tie_word_embeddings"] |= bool(config.get("tie_word_embeddings", False))
    vision = _inner_config(config, "vision_config", "siglip_vision_model")
    return ModelSize(_decoder_size(text), vision_size(vision), layout="anyres")


def read_internvl(config: Config) -> ModelSize:
    """Return the size of an InternVL configuration."""
    text = _inner_config(config, "text_config", "qwen2")
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", True))
    vision = _inner_config(config, "vision_config", "internvl_vision")
    return ModelSize(_decoder_size(text), vision_size(vision), layout="dynamic")


def read_qwen2_audio(config: Config) -> ModelSize:
    """Return the size of a Qwen2-Audio configuration."""
    audio = _inner_config(config, "audio_config", "qwen2_audio_encoder")
    encoder = AudioSize(frames=2 * audio["max_source_positions"], **size_fields(audio, AUDIO_KEYS))
    return ModelSize(_decoder_size(_inner_config(config, "text_config", "qwen2")), audio=encoder)


def read_qwen3_vl(config: Config) -> Qwen3VLSize:
    """Return the size of a Qwen3-VL configuration."""
    text = _inner_config(config, "text_config", "qwen3_vl_text")
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    facts = native_vision_facts("qwen3_vl_vision", config)
    return Qwen3VLSize(_decoder_size(text), native_vision_size(facts, text["hidden_size"]))


def native_vision_facts(kind: str, config: Config) -> dict[str, Any]:
    """Return facts of a native-resolution tower of a kind from a whole model's configuration; early
    folders give the tower the model_type of the whole model."""
    return rules_for(kind).read({**(config.get("vision_config") or {}), "model_type": kind})


def native_vision_size(c: Config, out_width: int) -> NativeVisionSize:
    """Return the size of a tower's complete configuration, with features `out_width` wide."""
    if c["out_hidden_size"] != out_width:
        raise ValueError(
            f"vision_config.out_hidden_size is {c['out_hidden_size']}, text_config.hidden_size "
            f"{out_width}; they must be equal"
        )
    side = isqrt(c["num_position_embeddings"])
    if side**2 != c["num_position_embeddings"]:
        raise ValueError(
            f"vision_config.num_position_embeddings {c['num_position_embeddings']} is not a square"
        )
    deepstack = "deepstack_visual_indexes"
    taps = _int_list(c, deepstack) if deepstack in c else ()
    return NativeVisionSize(**size_fields(c, NATIVE_TOWER_KEYS), deepstack=taps, side=side)


READERS: Mapping[str, Callable[[Config], ModelSize | Qwen3VLSize]] = {
    "llava_onevision": read_llava,
    "internvl": read_internvl,
    "qwen2_audio": read_qwen2_audio,
    "qwen3_vl": read_qwen3_vl,
}


def folder_size(folder: str, kind: str, read: Callable[[Config], Any] | None = None) -> Any:
    """Return the size in a folder's config.json, None if there is no such file; `read` converts a
    configuration whose kind this file does not know.

    Raises:
      ValueError: the file is not JSON, or of another kind than `kind` (a model_type).
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{file}: not JSON ({e}); download it again") from None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != kind:
        raise ValueError(
            f"{file}: model_type is {model_type!r}, this model needs {kind!r}; choose the factory "
            "of that kind in models/"
        )
    try:
        return (read or READERS[kind])(config)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
