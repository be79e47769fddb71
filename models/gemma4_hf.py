"""Gemma 4's checkpoints without experts, per-layer embeddings or audio; see `gemma_hf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import gemma_hf
from models.gemma_sizes import GLOBAL, Gemma4Size, Gemma4VisionSize, GemmaSize, HeadsSize
from models.hf import INV_FREQ
from models.hf_config import (
    Config,
    FactRules,
    config_values,
    inner_facts,
    size_fields,
    text_config_of,
)
from models.hf_names import GATED_MLP, QKV, module_rules
from models.hf_tensors import HfWeightMap, Rule, tensors_of

# ---- names ----


_LAYER = "encoder.layers.{}."
_MATRICES = {**QKV, "out": "self_attn.o_proj", **GATED_MLP}
TOWER = (
    *module_rules("entry", "patch_embedder.", {"patch": "input_proj"}, "patch_matrix"),
    Rule("entry", "position", "patch_embedder.position_embedding_table", "same"),
    *module_rules("layers", _LAYER, {
        "attn_norm": "input_layernorm",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        **{ours: f"{theirs}.linear" for ours, theirs in _MATRICES.items()},
    }),
    *(
        Rule("layers", f"{ours}_{bound}", f"{_LAYER}{theirs}.{bound}", "same")
        for ours, theirs in _MATRICES.items()
        for bound in ("input_min", "input_max", "output_min", "output_max")
    ),
    Rule("exit", "std_bias", "std_bias"),
    Rule("exit", "std_scale", "std_scale"),
)  # fmt: skip
PROJECTOR = module_rules("exit", "", {"projection": "embedding_projection"})

# ---- configurations ----

TEXT_DEFAULTS: Config = {
    **gemma_hf.COMMON_TEXT_DEFAULTS, "vocab_size": 262144, "num_hidden_layers": 30,
    "sliding_window": 512, "use_bidirectional_attention": None, "attention_k_eq_v": False,
}  # fmt: skip
VISION_DEFAULTS: Config = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
    "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "attention_bias": False,
    "pooling_kernel_size": 3, "patch_size": 16, "position_embedding_size": 10240,
    "use_clipped_linears": False, "standardize": False,
}  # fmt: skip
# Fields of a tower, and their config keys.
VISION_KEYS = {
    "width": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp": "intermediate_size",
    "patch_px": "patch_size", "merge": "pooling_kernel_size", "side": "position_embedding_size",
    "norm_eps": "rms_norm_eps", "clipped": "use_clipped_linears", "standardized": "standardize",
}  # fmt: skip
ROPE_DEFAULTS: Mapping[str, Config] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
# Keys of the unsupported E-forms and the form with experts: (key, its default, description).
UNSUPPORTED_FORMS = (
    ("hidden_size_per_layer_input", 256, "per-layer embeddings (Gemma 4's E-forms)"),
    ("num_kv_shared_layers", 0, "layers that share keys and values (Gemma 4's E-forms)"),
    ("enable_moe_block", False, "experts"),
)


def text_facts(config: Config) -> dict[str, Any]:
    """Return facts of a `gemma4_text` configuration, alone or inside one with a tower."""
    for key, default, rope_type in UNSUPPORTED_FORMS:
        if value := config.get(key, default):
            raise ValueError(
                f"{key} is {value!r}: {rope_type} are not supported, only Gemma 4's dense form is"
            )
    facts = {key: config.get(key, default) for key, default in TEXT_DEFAULTS.items()}
    only = {
        "hidden_activation": gemma_hf.SUPPORTED["hidden_activation"],
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, "vision"),
    }
    gemma_hf.check_supported(facts, only)
    types = gemma_hf.layer_types(config, facts["num_hidden_layers"], 6)
    facts["layer_types"] = (*types[:-1], "full_attention")  # as in transformers
    facts["full_attention"] = _global_heads(config, facts)
    rope_by_type = config.get("rope_parameters") or ROPE_DEFAULTS
    for kind, default_rope in ROPE_DEFAULTS.items():
        facts[f"rope_parameters.{kind}"] = _rope_settings(
            kind, rope_by_type.get(kind) or default_rope
        )
    return facts


def _rope_settings(kind: str, rope: Config) -> tuple[float, float, float]:
    """Return (base, share of rotated pairs, position factor) of a kind of layers."""
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ("default", "proportional"):
        raise ValueError(
            f"rope_parameters.{kind}: rope_type {rope_type!r} is not supported; "
            "use default or proportional"
        )
    if rope_type == "default":
        return float(rope.get("rope_theta", 1e4)), 1.0, 1.0
    rotated_share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
    return float(rope.get("rope_theta", 1e4)), float(rotated_share), float(factor)


def _global_heads(config: Config, facts: Config) -> tuple[int, int]:
    """Return (head_dim, kv heads) of global layers, from published or transformers 5.24's keys."""
    base = (facts["head_dim"], facts["num_key_value_heads"])
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        n_kv = config.get("num_global_key_value_heads") if facts["attention_k_eq_v"] else None
        return config.get("global_head_dim", 512), n_kv or base[1]
    heads_by_type: dict[str, set[tuple[int, int]]] = {name: set() for name in gemma_hf.KINDS}
    for number, name in enumerate(facts["layer_types"]):
        layer_heads = by_layer.get(str(number), by_layer.get(number, {}))
        if not set(layer_heads) <= {"head_dim", "num_key_value_heads"}:
            raise ValueError(f"per_layer_config.{number} has {', '.join(layer_heads)}; only "
                             "head_dim and num_key_value_heads are supported")  # fmt: skip
        heads = (
            layer_heads.get("head_dim", base[0]),
            layer_heads.get("num_key_value_heads", base[1]),
        )
        heads_by_type[name].add(heads)
    if len(heads_by_type["full_attention"]) > 1 or not heads_by_type["sliding_attention"] <= {base}:
        raise ValueError("per_layer_config: layers of one type must have equal heads")
    return next(iter(heads_by_type["full_attention"]))


def text_size(facts: Config) -> GemmaSize:
    """Return the decoder size of these facts."""
    n_heads = facts["num_attention_heads"]

    def heads(kind: str, heads_and_kv: tuple[int, int], window: int) -> HeadsSize:
        head_dim, n_kv_heads = heads_and_kv
        theta, rotated_share, factor = facts[f"rope_parameters.{kind}"]
        is_whole = kind == "full_attention"
        return HeadsSize(
            n_heads,
            n_kv_heads,
            head_dim,
            theta,
            1.0,
            window,
            rotated_pairs=None if rotated_share == 1.0 else int(rotated_share * head_dim // 2),
            position_factor=factor,
            values_are_keys=is_whole and facts["attention_k_eq_v"],
            bidirectional_images=not is_whole and facts["use_bidirectional_attention"] == "vision",
        )

    window, sliding_heads = (
        facts["sliding_window"],
        (facts["head_dim"], facts["num_key_value_heads"]),
    )
    return GemmaSize(
        facts["hidden_size"],
        facts["intermediate_size"],
        facts["vocab_size"],
        tuple(gemma_hf.KINDS[name] for name in facts["layer_types"]),
        heads("sliding_attention", sliding_heads, window),
        heads("full_attention", facts["full_attention"], 0),
        norm_eps=facts["rms_norm_eps"],
        norm_offset=0.0,
        value_norm=True,
        layer_scalar=True,
        cap=facts["final_logit_softcapping"] or 0.0,
        tied=facts["tie_word_embeddings"],
    )


def text_config(size: GemmaSize) -> dict[str, Any]:
    """Return the configuration of a Gemma 4 decoder, in the published form."""

    def rope(heads: HeadsSize) -> dict[str, Any]:
        if heads.rotated_pairs is None and heads.position_factor == 1.0:
            return {"rope_type": "default", "rope_theta": heads.theta}
        turned = heads.head_dim // 2 if heads.rotated_pairs is None else heads.rotated_pairs
        rotated_share = {"partial_rotary_factor": turned / (heads.head_dim // 2)}
        factor = {"factor": heads.position_factor} if heads.position_factor != 1.0 else {}
        return {"rope_type": "proportional", "rope_theta": heads.theta, **rotated_share, **factor}

    return {
        "model_type": "gemma4_text",
        **gemma_hf.text_config(size),
        **_global_heads_config(size),
        "attention_k_eq_v": size.global_heads.values_are_keys,
        "use_bidirectional_attention": "vision"
        if size.sliding_heads.bidirectional_images
        else None,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": rope(size.global_heads),
            "sliding_attention": rope(size.sliding_heads),
        },
    }


def _global_heads_config(size: GemmaSize) -> dict[str, Any]:
    """Return the heads of global layers, in the published form if it can express them."""
    whole = size.global_heads
    if whole.values_are_keys:
        heads = whole.head_dim, whole.n_kv_heads
        return dict(zip(("global_head_dim", "num_global_key_value_heads"), heads, strict=True))
    layer_heads = {"head_dim": whole.head_dim, "num_key_value_heads": whole.n_kv_heads}
    return {
        "per_layer_config": {str(i): layer_heads for i, k in enumerate(size.kinds) if k == GLOBAL}
    }


def gemma4_facts(config: Config) -> dict[str, Any]:
    """Return facts of a `gemma4` configuration."""
    if config.get("audio_config"):
        raise ValueError("audio_config: audio is not supported; Gemma 4's dense form has none")
    facts = {f"text_config.{k}": v for k, v in text_facts(text_config_of(config)).items()}
    vision_config_values = config.get("vision_config")
    if vision_config_values is None:
        return facts | {"vision_config": None}
    vision = {
        key: vision_config_values.get(key, default) for key, default in VISION_DEFAULTS.items()
    }
    only = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False, None)}
    gemma_hf.check_supported(vision, only)
    rope = vision_config_values.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ValueError(f"vision_config.rope_parameters: {rope}; only axial ones are supported")
    vision["rope_theta"] = float(rope.get("rope_theta", 100.0))
    vision["attention_bias"] = bool(vision["attention_bias"])
    return facts | {f"vision_config.{k}": v for k, v in vision.items()}


def read_gemma4(config: Config) -> Gemma4Size:
    """Return the size of a `gemma4` configuration."""
    facts = gemma4_facts(config)
    decoder, v = text_size(inner_facts(facts, "text_config")), inner_facts(facts, "vision_config")
    if not v:
        return Gemma4Size(decoder)
    return Gemma4Size(
        decoder, Gemma4VisionSize(**size_fields(v, VISION_KEYS), theta=v["rope_theta"])
    )


def read_gemma4_text(config: Config) -> Gemma4Size:
    """Return the size of a `gemma4_text` configuration."""
    return Gemma4Size(text_size(text_facts(config)))


def vision_config(v: Gemma4VisionSize) -> dict[str, Any]:
    """Return the configuration of a tower."""
    return {
        "model_type": "gemma4_vision",
        **config_values(v, VISION_KEYS),
        "rope_parameters": {"rope_type": "axial", "rope_theta": v.theta},
    }


# ---- checkpoints ----


def gemma4_weights(modules: Mapping[str, Any], size: Gemma4Size, *, alone: bool) -> HfWeightMap:
    """Return the map of Gemma4ForConditionalGeneration or, if `alone`, of Gemma4ForCausalLM."""
    decoder, llm = size.decoder, modules["llm"]
    if alone:
        return HfWeightMap(
            tensors=tuple(gemma_hf.llm_tensors(llm, "model.", "")),
            config={**text_config(decoder), "architectures": ["Gemma4ForCausalLM"]},
            config_rules=FactRules(text_facts),
            ignored=(INV_FREQ,),
            copies=gemma_hf.tied_copies(decoder, "model.", ""),
        )
    body = "model.language_model."
    tower, vision = modules.get("vision"), size.vision
    of_tower = (
        *tensors_of(tower, "vision", TOWER, "model.vision_tower."),
        *tensors_of(tower, "vision", PROJECTOR, "model.embed_vision."),
    ) if tower else ()  # fmt: skip
    return HfWeightMap(
        tensors=(*of_tower, *gemma_hf.llm_tensors(llm, body, "")),
        config={
            "model_type": "gemma4",
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": text_config(decoder),
            "vision_config": vision_config(vision) if vision else None,
            "audio_config": None,
            "tie_word_embeddings": decoder.tied,
        },
        config_rules=FactRules(gemma4_facts),
        ignored=(INV_FREQ,),
        copies=gemma_hf.tied_copies(decoder, body, ""),
    )
