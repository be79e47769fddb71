"""Gemma's checkpoints of transformers: their configurations and their tensors.

A configuration is read into facts: every key that affects the computation, by transformers' newest
name, with the default of an absent one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from models import hf_sizes
from models.gemma_sizes import GLOBAL, SLIDING, Gemma3Size, GemmaSize, HeadsSize
from models.hf import ALIASES, INV_FREQ
from models.hf_config import Config, FactRules, inner_facts, rules_for, text_config_of
from models.hf_names import EMBEDDING, GATED_MLP, HEAD, QKV_NORMED, SIGLIP, module_rules
from models.hf_tensors import HfTensor, HfWeightMap, Rule, tensors_of

KINDS = {"sliding_attention": SLIDING, "full_attention": GLOBAL}
TYPES = {kind: name for name, kind in KINDS.items()}

# ---- names ----


def _layers(kind: str) -> tuple[Rule, ...]:
    layer = "layers.{}."
    return (
        *module_rules(kind, layer, {
            "attn_norm": "input_layernorm", **QKV_NORMED, "out": "self_attn.o_proj",
            "attn_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm", **GATED_MLP,
            "mlp_out_norm": "post_feedforward_layernorm",
        }),
        Rule(kind, "layer_scalar", f"{layer}layer_scalar"),
    )  # fmt: skip


DECODER = (
    EMBEDDING,
    *_layers(SLIDING),
    *_layers(GLOBAL),
    *module_rules("exit", "", {"norm": "norm"}),
)
PROJECTOR = (
    *module_rules("exit", "", {"soft_norm": "mm_soft_emb_norm"}),
    Rule("exit", "projection/kernel", "mm_input_projection_weight", "same"),
)


def llm_tensors(module: Any, body: str, head: str) -> list[HfTensor]:
    """List the tensors of a decoder, whose body and head have these prefixes."""
    return [*tensors_of(module, "llm", DECODER, body), *tensors_of(module, "llm", HEAD, head)]


def tied_copies(size: GemmaSize, body: str, head: str) -> Mapping[str, str]:
    """Return the names of a tied head, which a file may contain or not."""
    return {f"{head}lm_head.weight": f"{body}embed_tokens.weight"} if size.tied else {}


# ---- configurations ----

# Values that a configuration must have, by key; others are not supported.
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),
}
# Defaults of absent keys, of decoders of both generations and of Gemma 3's.
COMMON_TEXT_DEFAULTS: Config = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6, "attention_bias": False, "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}  # fmt: skip
TEXT_DEFAULTS: Config = {
    **COMMON_TEXT_DEFAULTS, "vocab_size": 262208, "num_hidden_layers": 26,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}  # fmt: skip


def check_supported(facts: Config, only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError if facts have an unsupported value."""
    for key, allowed in only.items():
        if facts[key] not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ValueError(f"{key} is {facts[key]!r}; only {names} is supported")


def layer_types(config: Config, n_layers: int, period: int) -> tuple[str, ...]:
    """Return the types of all layers; without a list, every `period`-th is global."""
    types = config.get("layer_types") or [
        TYPES[SLIDING if (i + 1) % period else GLOBAL] for i in range(n_layers)
    ]
    if len(types) != n_layers or not set(types) <= set(KINDS):
        raise ValueError(f"layer_types must be {n_layers} of {', '.join(KINDS)}: {types}")
    return tuple(types)


def gemma3_text_facts(config: Config) -> dict[str, Any]:
    """Return facts of a `gemma3_text` configuration, alone or inside one with a tower."""
    facts = {key: config.get(key, default) for key, default in TEXT_DEFAULTS.items()}
    check_supported(facts, {**SUPPORTED, "use_bidirectional_attention": (False, None)})
    period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    facts["layer_types"] = layer_types(config, facts["num_hidden_layers"], period)
    rope_by_type = config.get("rope_parameters") or {}
    old_theta_keys = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    default_theta = {"full_attention": 1e6, "sliding_attention": 1e4}
    for kind, name in old_theta_keys.items():
        rope = dict(rope_by_type.get(kind) or {})
        if kind == "full_attention":
            rope |= config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "linear"):
            raise ValueError(
                f"rope_parameters.{kind}: rope_type {rope_type!r} is not supported; "
                "use default or linear"
            )
        theta: Any = rope.get("rope_theta", config.get(name, default_theta[kind]))
        factor = rope.get("factor", 1.0) if rope_type == "linear" else 1.0
        facts[f"rope_parameters.{kind}"] = (float(theta), float(factor))
    return facts


def gemma3_text_size(facts: Config) -> GemmaSize:
    """Return the decoder size of these facts, for pictures and text."""
    shape = (facts["num_attention_heads"], facts["num_key_value_heads"], facts["head_dim"])
    scale, window = float(facts["query_pre_attn_scalar"]) ** -0.5, facts["sliding_window"]

    def heads(kind: str, window: int) -> HeadsSize:
        theta, factor = facts[f"rope_parameters.{kind}"]
        return HeadsSize(
            *shape, theta, scale, window, position_factor=factor, bidirectional_images=True
        )

    return GemmaSize(
        facts["hidden_size"],
        facts["intermediate_size"],
        facts["vocab_size"],
        tuple(KINDS[name] for name in facts["layer_types"]),
        heads("sliding_attention", window),
        heads("full_attention", 0),
        norm_eps=facts["rms_norm_eps"],
        cap=facts["final_logit_softcapping"] or 0.0,
        tied=facts["tie_word_embeddings"],
    )


def text_config(size: GemmaSize) -> dict[str, Any]:
    """Return the configuration keys that all Gemma decoders have."""
    s = size.sliding_heads
    return {
        "hidden_size": size.width,
        "intermediate_size": size.mlp,
        "vocab_size": size.vocab,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": s.n_heads,
        "num_key_value_heads": s.n_kv_heads,
        "head_dim": s.head_dim,
        "rms_norm_eps": size.norm_eps,
        "sliding_window": s.window,
        "layer_types": [TYPES[kind] for kind in size.kinds],
        "final_logit_softcapping": size.cap or None,
        "tie_word_embeddings": size.tied,
        "max_position_embeddings": 131072,
    }


def gemma3_text_config(size: GemmaSize) -> dict[str, Any]:
    """Return the configuration of a Gemma 3 decoder."""

    def rope(heads: HeadsSize) -> dict[str, Any]:
        linear = {"rope_type": "linear", "factor": heads.position_factor}
        kind = linear if heads.position_factor != 1.0 else {"rope_type": "default"}
        return {"rope_theta": heads.theta, **kind}

    scalar = size.sliding_heads.scale**-2
    return {
        "model_type": "gemma3_text",
        **text_config(size),
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "rope_parameters": {
            "full_attention": rope(size.global_heads),
            "sliding_attention": rope(size.sliding_heads),
        },
    }


def gemma3_facts(config: Config) -> dict[str, Any]:
    """Return facts of a `gemma3` configuration."""
    facts = {f"text_config.{k}": v for k, v in gemma3_text_facts(text_config_of(config)).items()}
    if facts["text_config.final_logit_softcapping"]:
        raise ValueError("text_config.final_logit_softcapping: transformers caps text models only")
    vision = rules_for("siglip_vision_model").read(config.get("vision_config") or {})
    facts |= {f"vision_config.{k}": v for k, v in vision.items()}
    return facts | {"mm_tokens_per_image": config.get("mm_tokens_per_image", 256)}


def read_gemma3(config: Config) -> Gemma3Size:
    """Return the size of a `gemma3` configuration."""
    facts = gemma3_facts(config)
    vision = hf_sizes.vision_size(inner_facts(facts, "vision_config"))
    side = isqrt(facts["mm_tokens_per_image"])
    if side**2 != facts["mm_tokens_per_image"] or not side or vision.grid % side:
        raise ValueError(
            f"mm_tokens_per_image {facts['mm_tokens_per_image']} is not a square whose side "
            f"divides the {vision.grid} patches of a picture's side"
        )
    tower = replace(vision, merge=vision.grid // side, post_norm=True)
    return Gemma3Size(gemma3_text_size(inner_facts(facts, "text_config")), tower)


def read_gemma3_text(config: Config) -> Gemma3Size:
    """Return the size of a `gemma3_text` configuration."""
    return Gemma3Size(gemma3_text_size(gemma3_text_facts(config)))


# ---- checkpoints ----


def gemma3_weights(modules: Mapping[str, Any], size: Gemma3Size) -> HfWeightMap:
    """Return the map of Gemma3ForConditionalGeneration, or without a tower of Gemma3ForCausalLM."""
    decoder = size.decoder
    if size.vision is None:
        return HfWeightMap(
            tensors=tuple(llm_tensors(modules["llm"], "model.", "")),
            config={**gemma3_text_config(decoder), "architectures": ["Gemma3ForCausalLM"]},
            config_rules=FactRules(gemma3_text_facts),
            aliases=((r"^(?=embed_tokens\.|layers\.|norm\.)", "model."),),
            ignored=(INV_FREQ,),
            copies=tied_copies(decoder, "model.", ""),
        )
    body, head = "language_model.model.", "language_model."
    vision = modules["vision"]
    return HfWeightMap(
        tensors=(
            *tensors_of(vision, "vision", SIGLIP, "vision_tower."),
            *tensors_of(vision, "vision", PROJECTOR, "multi_modal_projector."),
            *llm_tensors(modules["llm"], body, head),
        ),
        config={
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": gemma3_text_config(decoder),
            "vision_config": hf_sizes.vision_config(size.vision),
            "mm_tokens_per_image": size.vision.tokens_per_tile,
            "tie_word_embeddings": decoder.tied,
        },
        config_rules=FactRules(gemma3_facts),
        aliases=(*ALIASES, (r"^vision_tower\.vision_model\.", "vision_tower.")),
        ignored=(INV_FREQ, r"vision_tower\.head\..*"),
        copies=tied_copies(decoder, body, head),
    )
