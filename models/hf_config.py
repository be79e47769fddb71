"""Keys of transformers' config.json that affect the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

Config = Mapping[str, Any]

_QWEN: Config = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 22016, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters.rope_theta": 10000.0, "rope_parameters.rope_type": "default",
}  # fmt: skip
_QWEN3: Config = {**_QWEN, "head_dim": 128, "attention_bias": False}
_NATIVE_TOWER: Config = {
    "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304, "rope_parameters.rope_theta": 10000.0,
    "rope_parameters.rope_type": "axial",
}  # fmt: skip
# Defaults in transformers of absent keys, by the configuration's model_type.
_DEFAULTS: Mapping[str, Config] = {
    "qwen2": {**_QWEN, "use_sliding_window": False},
    "llama": {
        **_QWEN, "num_key_value_heads": None, "intermediate_size": 11008, "vocab_size": 32000,
        "attention_bias": False, "mlp_bias": False, "head_dim": None,
    },
    "qwen3": {**_QWEN3, "use_sliding_window": False},
    "qwen3_vl_text": {
        **_QWEN3, "rope_parameters.rope_theta": 500000.0,
        "rope_parameters.mrope_section": [24, 20, 20],
    },
    "qwen3_vl_vision": {**_NATIVE_TOWER, "deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_5_vision": _NATIVE_TOWER,
    "siglip_vision_model": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "image_size": 224, "patch_size": 16, "num_channels": 3,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    },
    "internvl_vision": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096, "image_size": 448, "patch_size": 14, "num_channels": 3,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu", "attention_bias": False,
        "use_qk_norm": False, "norm_type": "layer_norm", "use_absolute_position_embeddings": True,
        "use_mask_token": False, "use_mean_pooling": True,
    },
    "qwen2_audio_encoder": {
        "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120, "num_mel_bins": 128, "max_source_positions": 1500,
        "activation_function": "gelu", "scale_embedding": False,
    },
    "llava_onevision": {
        "projector_hidden_act": "gelu", "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1, "multimodal_projector_bias": True,
    },
    "internvl": {
        "projector_hidden_act": "gelu", "vision_feature_select_strategy": "default",
        "vision_feature_layer": -1, "downsample_ratio": 0.5, "tie_word_embeddings": True,
    },
    "qwen2_audio": {},
    "qwen3_vl": {"tie_word_embeddings": False},
}  # fmt: skip
DEFAULTS = {kind: {**values, "model_type": kind} for kind, values in _DEFAULTS.items()}
# Older spellings of keys, in a configuration or below its text_config.
SPELLINGS = {
    "rope_theta": "rope_parameters.rope_theta",
    "rope_scaling.rope_type": "rope_parameters.rope_type",
    "rope_scaling.type": "rope_parameters.rope_type",
    "rope_scaling.mrope_section": "rope_parameters.mrope_section",
}


@dataclass(frozen=True)
class ConfigRules:
    """The keys of a configuration that affect the computation, and the defaults of absent ones.

    Keys are dotted. `defaults` has every compared key, with transformers' value for an absent one.
    `spellings` maps an older key to the one used here. If a file is of the kind `wraps` (such as
    "siglip"), the configuration below that kind's key is read.
    """

    defaults: Config
    spellings: Mapping[str, str]
    wraps: tuple[str, str] | None = None

    def read(self, config: Config) -> dict[str, Any]:
        """Return every compared key with its value in the file."""
        if self.wraps and config.get("model_type") == self.wraps[0]:
            config = config.get(self.wraps[1]) or {}
        flat = _flatten(config)
        for old, new in self.spellings.items():
            if old in flat and new not in flat:
                flat[new] = flat[old]
        values: dict[str, Any] = {
            key: flat.get(key, default) for key, default in self.defaults.items()
        }
        for key, value in values.items():
            prefix = key[: key.rfind(".") + 1]
            if value is None and key.endswith("num_key_value_heads"):
                values[key] = values[f"{prefix}num_attention_heads"]
            if value is None and key.endswith("head_dim"):
                heads = values[f"{prefix}num_attention_heads"]
                values[key] = values[f"{prefix}hidden_size"] // heads
        return values

    def mismatches(self, config: Config, ours: Config) -> list[tuple[str, Any, Any]]:
        """Return (key, value of `config`, value of `ours`) of every key that disagrees."""
        theirs, ours_read = self.read(config), self.read(ours)
        return [(k, theirs[k], ours_read[k]) for k in theirs if not _equal(theirs[k], ours_read[k])]


class ConfigComparison(Protocol):
    """How the configuration of a file is compared with that of a model."""

    def mismatches(self, config: Config, ours: Config) -> list[tuple[str, Any, Any]]:
        """Return (key, value of `config`, value of `ours`) of every key that disagrees."""
        ...


@dataclass(frozen=True)
class FactRules:
    """A `ConfigComparison` of the facts that a function reads from configurations."""

    read: Callable[[Config], Config]

    def mismatches(self, config: Config, ours: Config) -> list[tuple[str, Any, Any]]:
        """See `ConfigComparison`."""
        theirs, ours_read = self.read(config), self.read(ours)
        return [(k, theirs.get(k), v) for k, v in ours_read.items() if theirs.get(k) != v]


def _flatten(config: Config, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _equal(a: Any, b: Any) -> bool:
    return bool(square_side(a) == square_side(b))


def inner_facts(facts: Config, key: str) -> dict[str, Any]:
    """Return the facts of the configuration below a key."""
    return {k.removeprefix(f"{key}."): v for k, v in facts.items() if k.startswith(f"{key}.")}


def text_config_of(config: Config) -> dict[str, Any]:
    """Return the "text_config", with "tie_word_embeddings" from the top level by default."""
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True),
            **(config.get("text_config") or {})}  # fmt: skip


def square_side(value: Any) -> Any:
    """Return the side of a square that is given as [side, side]."""
    square = isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]
    return value[0] if square else value


def config_values(size: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration's values of a size, from the key of each of its fields."""
    return {key: getattr(size, field) for field, key in keys.items()}


def size_fields(config: Config, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a size, from the configuration's key of each."""
    return {field: config[key] for field, key in keys.items()}


def rules_for(kind: str, *, wrapper_kind: str | None = None, **inner_kinds: str) -> ConfigRules:
    """Return rules of a configuration of a kind; `inner_kinds` names the kinds inside it,
    `wrapper_kind` a kind that may have this one as its vision_config."""
    defaults, spellings = dict(DEFAULTS[kind]), dict(SPELLINGS)
    for inner_key, inner in inner_kinds.items():
        for key, value in DEFAULTS[inner].items():
            # The top level decides whether a head is tied if it has the key.
            if not (key == "tie_word_embeddings" and key in defaults):
                defaults[f"{inner_key}.{key}"] = value
        spellings |= {f"{inner_key}.{old}": f"{inner_key}.{new}" for old, new in SPELLINGS.items()}
    return ConfigRules(
        defaults, spellings, (wrapper_kind, "vision_config") if wrapper_kind else None
    )


def drop_key(rules: ConfigRules, key: str) -> ConfigRules:
    """Return the same rules without comparing a key."""
    defaults = {k: v for k, v in rules.defaults.items() if k != key}
    return replace(rules, defaults=defaults)
