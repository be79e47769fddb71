"""Qwen3.5's checkpoints of transformers: their configurations and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import hf_sizes
from models.hf import INV_FREQ
from models.hf_config import SPELLINGS, Config, ConfigRules, FactRules, config_values, size_fields
from models.hf_names import (
    EMBEDDING,
    GATED_MLP,
    HEAD,
    QKV,
    QKV_NORMED,
    module_rules,
    qwen3_vl_tower,
)
from models.hf_tensors import HfTensor, HfWeightMap, Rule, tensors_of
from models.qwen3_5_sizes import FULL, LINEAR, DeltaSize, HybridSize, Qwen35Size

KINDS = {"linear_attention": LINEAR, "full_attention": FULL}
TYPES = {kind: name for name, kind in KINDS.items()}
IGNORED = (INV_FREQ, r"mtp\..*")  # multi-token prediction is not used

# ---- names ----


_LAYER = "layers.{}."
_COMMON_NAMES = {  # in layers of both kinds
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", **GATED_MLP,
}  # fmt: skip
DECODER = (
    EMBEDDING,
    *module_rules(LINEAR, _LAYER, _COMMON_NAMES),
    *module_rules(LINEAR, f"{_LAYER}linear_attn.", {
        **dict.fromkeys(QKV, "in_proj_qkv"),  # one tensor has them, in this order
        "out_gate": "in_proj_z", "write": "in_proj_b", "step": "in_proj_a",
        "delta_norm": "norm", "out": "out_proj",
    }),
    *(
        Rule(LINEAR, f"{name}_conv/taps", f"{_LAYER}linear_attn.conv1d.weight", "channel_conv")
        for name in QKV
    ),
    *(Rule(LINEAR, name, f"{_LAYER}linear_attn.{name}") for name in ("A_log", "dt_bias")),
    *module_rules(FULL, _LAYER, {**_COMMON_NAMES, **QKV_NORMED, "out": "self_attn.o_proj"}),
    *module_rules("exit", "", {"norm": "norm"}),
)  # fmt: skip


def _llm(module: Any, body: str) -> list[HfTensor]:
    return [*tensors_of(module, "llm", DECODER, body), *tensors_of(module, "llm", HEAD, "")]


# ---- configurations ----

# transformers' defaults of absent keys
_ROPE = "rope_parameters"
TEXT_RULES = ConfigRules(
    {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "layer_types": None,
        "full_attention_interval": 4, f"{_ROPE}.rope_theta": 10000.0,
        f"{_ROPE}.rope_type": "default", f"{_ROPE}.partial_rotary_factor": 0.25,
        f"{_ROPE}.mrope_section": [11, 11, 10],
    },
    {
        **SPELLINGS,
        "partial_rotary_factor": f"{_ROPE}.partial_rotary_factor",
        "rope_scaling.partial_rotary_factor": f"{_ROPE}.partial_rotary_factor",
    },
)  # fmt: skip
# Fields of a delta net, and their config keys.
DELTA_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
SUPPORTED = {"hidden_act": "silu", "attention_bias": False, f"{_ROPE}.rope_type": "default"}


def text_facts(config: Config) -> dict[str, Any]:
    """Return every key of a decoder's configuration that affects the computation.

    Raises:
      ValueError: an unsupported value.
    """
    facts = TEXT_RULES.read(config)
    interval = facts.pop("full_attention_interval")
    if facts["layer_types"] is None:
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"full_attention_interval is {interval!r}; it must be 1 or more")
        n = facts["num_hidden_layers"]
        facts["layer_types"] = [TYPES[LINEAR if (i + 1) % interval else FULL] for i in range(n)]
    for key, value in SUPPORTED.items():
        if facts[key] != value:
            raise ValueError(f"{key} is {facts[key]!r}; only {value!r} is supported")
    return facts


def _decoder(c: Config, *, tied: bool) -> HybridSize:
    if unknown := set(c["layer_types"]) - set(KINDS):
        raise ValueError(f"layer_types has {sorted(unknown)}; known: {', '.join(KINDS)}")
    return HybridSize(
        **size_fields(c, hf_sizes.DECODER_KEYS),
        rope_theta=float(c[f"{_ROPE}.rope_theta"]),
        qkv_bias=False,
        tied=tied,
        qk_norm=True,
        head_size=c["head_dim"],
        mrope_sections=tuple(c[f"{_ROPE}.mrope_section"]),
        kinds=tuple(KINDS[name] for name in c["layer_types"]),
        delta=DeltaSize(**size_fields(c, DELTA_KEYS)),
        rotary_size=int(c["head_dim"] * c[f"{_ROPE}.partial_rotary_factor"]),
    )


def text_config(s: HybridSize) -> dict[str, Any]:
    """Return a decoder's size as a configuration."""
    return {
        "model_type": "qwen3_5_text",
        **config_values(s, hf_sizes.DECODER_KEYS),
        "head_dim": s.head_dim,
        "layer_types": [TYPES[kind] for kind in s.kinds],
        **config_values(s.delta, DELTA_KEYS),
        "tie_word_embeddings": s.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.rope_theta,
            "partial_rotary_factor": s.rotary_size / s.head_dim,
            "mrope_section": list(s.mrope_sections),
            "mrope_interleaved": True,
        },
    }


def _is_tied(config: Config) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _model_facts(config: Config) -> dict[str, Any]:
    """Return facts of the whole model's configuration."""
    vision = hf_sizes.native_vision_facts("qwen3_5_vision", config)
    return {
        "model_type": config.get("model_type"),
        "tie_word_embeddings": _is_tied(config),
        **{f"text_config.{k}": v for k, v in text_facts(config.get("text_config") or {}).items()},
        **{f"vision_config.{k}": v for k, v in vision.items()},
    }


def _text_model_facts(config: Config) -> dict[str, Any]:
    top_level = {"model_type": config.get("model_type"), "tie_word_embeddings": _is_tied(config)}
    return top_level | text_facts(config)


def read_qwen3_5(config: Config) -> Qwen35Size:
    """Return the size of a Qwen3.5 configuration."""
    decoder = _decoder(text_facts(config.get("text_config") or {}), tied=_is_tied(config))
    facts = hf_sizes.native_vision_facts("qwen3_5_vision", config)
    return Qwen35Size(decoder, hf_sizes.native_vision_size(facts, decoder.width))


def read_qwen3_5_text(config: Config) -> Qwen35Size:
    """Return the size of the configuration of a decoder alone."""
    return Qwen35Size(_decoder(text_facts(config), tied=_is_tied(config)))


# ---- weights ----


def weight_map(modules: Mapping[str, Any], size: Qwen35Size) -> HfWeightMap:
    """Return the map of Qwen3_5ForConditionalGeneration, or of Qwen3_5ForCausalLM for a decoder."""
    llm, text = modules["llm"], text_config(size.decoder)
    body = "model.language_model." if size.vision else "model."
    tensors = _llm(llm, body)
    config: dict[str, Any] = {**text, "architectures": ["Qwen3_5ForCausalLM"]}
    facts = _text_model_facts
    ignored: tuple[str, ...] = (*IGNORED, r"model\.visual\..*")
    if size.vision:
        names = qwen3_vl_tower(())
        tensors = [*tensors_of(modules["vision"], "vision", names, "model.visual."), *tensors]
        tower = hf_sizes.qwen3_vl_vision_config(size.vision, size.decoder.width)
        del tower["deepstack_visual_indexes"]
        config = {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "vision_config": tower | {"model_type": "qwen3_5_vision"},
            "text_config": text,
            "tie_word_embeddings": size.decoder.tied,
        }
        facts, ignored = _model_facts, IGNORED
    return HfWeightMap(
        tensors=tuple(tensors),
        config=config,
        config_rules=FactRules(facts),
        ignored=ignored,
        copies={"lm_head.weight": f"{body}embed_tokens.weight"} if llm.tied else {},
    )
