"""Sizes as configurations of transformers, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.hf_config import DEFAULTS, Config, rules, side
from models.sizes import AudioSize, DecoderSize, ModelSize, VisionSize

# ---- a size as a configuration ----


def decoder_config(s: DecoderSize, *, tie: bool = True) -> dict[str, Any]:
    """Without `tie` it does not say whether the head is tied."""
    config: dict[str, Any] = {
        "model_type": "qwen2" if s.qkv_bias else "llama",
        "architectures": ["Qwen2ForCausalLM" if s.qkv_bias else "LlamaForCausalLM"],
        "hidden_size": s.width,
        "num_hidden_layers": s.n_layers,
        "num_attention_heads": s.n_heads,
        "num_key_value_heads": s.n_kv_heads,
        "intermediate_size": s.mlp,
        "vocab_size": s.vocab,
        "rms_norm_eps": s.norm_eps,
        "rope_parameters": {"rope_theta": s.rope_theta, "rope_type": "default"},
    }
    if not s.qkv_bias:
        config["head_dim"] = s.head_dim
    return config | ({"tie_word_embeddings": s.tied} if tie else {})


def vision_config(s: VisionSize) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_size": s.width,
        "num_hidden_layers": s.n_layers,
        "num_attention_heads": s.n_heads,
        "intermediate_size": s.mlp,
        "layer_norm_eps": s.norm_eps,
    }
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
        "d_model": s.width,
        "encoder_layers": s.n_layers,
        "encoder_attention_heads": s.n_heads,
        "encoder_ffn_dim": s.mlp,
        "num_mel_bins": s.mel_bins,
        "max_source_positions": s.positions,
    }


# ---- a configuration as a size ----


def _decoder(c: Config) -> DecoderSize:
    qwen = c["model_type"] == "qwen2"
    return DecoderSize(
        width=c["hidden_size"],
        n_layers=c["num_hidden_layers"],
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"] or c["num_attention_heads"],
        mlp=c["intermediate_size"],
        vocab=c["vocab_size"],
        rope_theta=float(c["rope_parameters.rope_theta"]),
        norm_eps=c["rms_norm_eps"],
        qkv_bias=qwen,
        tied=c["tie_word_embeddings"],
    )


def _vision(c: Config) -> VisionSize:
    intern = c["model_type"] == "internvl_vision"
    return VisionSize(
        tile_px=side(c["image_size"]),
        patch_px=side(c["patch_size"]),
        width=c["hidden_size"],
        n_layers=c["num_hidden_layers"],
        n_heads=c["num_attention_heads"],
        mlp=c["intermediate_size"],
        merge=2 if intern else 1,
        post_norm=False,
        norm_eps=c["layer_norm_eps"],
        form="internvit" if intern else "siglip",
        qkv_bias=c["attention_bias"] if intern else True,
        qk_norm=intern and c["use_qk_norm"],
        rms_norm=intern and c["norm_type"] == "rms_norm",
    )


def _audio(c: Config) -> AudioSize:
    return AudioSize(
        frames=2 * c["max_source_positions"],
        mel_bins=c["num_mel_bins"],
        width=c["d_model"],
        n_layers=c["encoder_layers"],
        n_heads=c["encoder_attention_heads"],
        mlp=c["encoder_ffn_dim"],
    )


def _inner(config: Config, key: str, kind: str) -> dict[str, Any]:
    """A configuration inside another, complete; one that does not name its kind is of `kind`."""
    inner = dict(config.get(key) or {})
    name = inner.get("model_type", kind)
    if name not in DEFAULTS:
        raise ValueError(f"{key}.model_type is {name!r}; known: {', '.join(DEFAULTS)}")
    return rules(name).read(inner)


def read_llava(config: Config) -> ModelSize:
    """Size of a LLaVA-OneVision configuration."""
    text = _inner(config, "text_config", "qwen2")
    text["tie_word_embeddings"] |= bool(config.get("tie_word_embeddings", False))
    vision = _inner(config, "vision_config", "siglip_vision_model")
    return ModelSize(_decoder(text), _vision(vision), layout="anyres")


def read_internvl(config: Config) -> ModelSize:
    """Size of an InternVL configuration."""
    text = _inner(config, "text_config", "qwen2")
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", True))
    vision = _inner(config, "vision_config", "internvl_vision")
    return ModelSize(_decoder(text), _vision(vision), layout="dynamic")


def read_qwen2_audio(config: Config) -> ModelSize:
    """Size of a Qwen2-Audio configuration."""
    audio = _inner(config, "audio_config", "qwen2_audio_encoder")
    return ModelSize(_decoder(_inner(config, "text_config", "qwen2")), audio=_audio(audio))


READERS: Mapping[str, Callable[[Config], ModelSize]] = {
    "llava_onevision": read_llava,
    "internvl": read_internvl,
    "qwen2_audio": read_qwen2_audio,
}


def folder_size(folder: str, kind: str) -> ModelSize | None:
    """The size that a folder's config.json states, None when there is no such file.

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
    found = config.get("model_type") if isinstance(config, dict) else None
    if found != kind:
        raise ValueError(
            f"{file}: model_type is {found!r}, this model's is {kind!r}; choose the factory of "
            "that kind in models/"
        )
    try:
        return READERS[kind](config)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
