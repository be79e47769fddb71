"""Gemma 4's checkpoints of transformers, without experts, per-layer embeddings or sound: see
`models.gemma_hf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models import gemma_hf
from models.gemma_sizes import GLOBAL, Gemma4Size, Gemma4VisionSize, GemmaSize, HeadsSize
from models.hf import INV_FREQ
from models.hf_config import Config, Facts, fields_of, stated
from models.hf_names import GATED_MLP, QKV, named
from models.hf_tensors import HfWeightMap, Rule, tensors_of

# ---- names ----


_LAYER = "encoder.layers.{}."
_MATRICES = {**QKV, "out": "self_attn.o_proj", **GATED_MLP}
TOWER = (
    *named("entry", "patch_embedder.", {"patch": "input_proj"}, "patch_matrix"),
    Rule("entry", "position", "patch_embedder.position_embedding_table", "same"),
    *named("layers", _LAYER, {
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
PROJECTOR = named("exit", "", {"projection": "embedding_projection"})

# ---- configurations ----

TEXT: Config = {
    **gemma_hf.OF_BOTH,
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
    "attention_k_eq_v": False,
}
VISION: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
# Fields of a tower, and their keys.
VISION_KEYS = {
    "width": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "patch_px": "patch_size",
    "merge": "pooling_kernel_size",
    "side": "position_embedding_size",
    "norm_eps": "rms_norm_eps",
    "clipped": "use_clipped_linears",
    "standardized": "standardize",
}
ROPE: Mapping[str, Config] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
# What the E-forms and the form with experts have: key, its default, what it is.
OTHER_FORMS = (
    ("hidden_size_per_layer_input", 256, "per-layer embeddings (Gemma 4's E-forms)"),
    ("num_kv_shared_layers", 0, "layers that share keys and values (Gemma 4's E-forms)"),
    ("enable_moe_block", False, "experts"),
)


def text_facts(config: Config) -> dict[str, Any]:
    """Of a `gemma4_text` configuration, alone or within one of pictures."""
    for key, default, what in OTHER_FORMS:
        if value := config.get(key, default):
            raise ValueError(f"{key} is {value!r}: {what} are not built, Gemma 4's dense form is")
    facts = {key: config.get(key, default) for key, default in TEXT.items()}
    only = {
        "hidden_activation": gemma_hf.ONLY["hidden_activation"],
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, "vision"),
    }
    gemma_hf.check_only(facts, only)
    types = gemma_hf.layer_types(config, facts["num_hidden_layers"], 6)
    facts["layer_types"] = (*types[:-1], "full_attention")  # as transformers has it
    facts["full_attention"] = _whole_heads(config, facts)
    given = config.get("rope_parameters") or ROPE
    for kind, usual in ROPE.items():
        facts[f"rope_parameters.{kind}"] = _rope(kind, given.get(kind) or usual)
    return facts


def _rope(kind: str, rope: Config) -> tuple[float, float, float]:
    """(base, share of pairs that turn, factor of positions) of a kind of layers."""
    what = rope.get("rope_type", "default")
    if what not in ("default", "proportional"):
        raise ValueError(
            f"rope_parameters.{kind}: rope_type {what!r} is not built; default or proportional is"
        )
    if what == "default":
        return float(rope.get("rope_theta", 1e4)), 1.0, 1.0
    share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
    return float(rope.get("rope_theta", 1e4)), float(share), float(factor)


def _whole_heads(config: Config, facts: Config) -> tuple[int, int]:
    """(head_dim, kv heads) of global layers: as published, or as transformers 5.24 writes them."""
    base = (facts["head_dim"], facts["num_key_value_heads"])
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        n_kv = config.get("num_global_key_value_heads") if facts["attention_k_eq_v"] else None
        return config.get("global_head_dim", 512), n_kv or base[1]
    found: dict[str, set[tuple[int, int]]] = {name: set() for name in gemma_hf.KINDS}
    for number, name in enumerate(facts["layer_types"]):
        own = by_layer.get(str(number), by_layer.get(number, {}))
        if not set(own) <= {"head_dim", "num_key_value_heads"}:
            raise ValueError(f"per_layer_config.{number} has {', '.join(own)}; only head_dim and "
                             "num_key_value_heads are known here")  # fmt: skip
        heads = own.get("head_dim", base[0]), own.get("num_key_value_heads", base[1])
        found[name].add(heads)
    if len(found["full_attention"]) > 1 or not found["sliding_attention"] <= {base}:
        raise ValueError("per_layer_config: layers of one type must have equal heads")
    return next(iter(found["full_attention"]))


def text_size(facts: Config) -> GemmaSize:
    """The decoder of these facts."""
    n_heads = facts["num_attention_heads"]

    def heads(kind: str, own: tuple[int, int], window: int) -> HeadsSize:
        head_dim, n_kv_heads = own
        theta, share, factor = facts[f"rope_parameters.{kind}"]
        is_whole = kind == "full_attention"
        return HeadsSize(
            n_heads,
            n_kv_heads,
            head_dim,
            theta,
            1.0,
            window,
            turned=None if share == 1.0 else int(share * head_dim // 2),
            factor=factor,
            values_are_keys=is_whole and facts["attention_k_eq_v"],
            pictures=not is_whole and facts["use_bidirectional_attention"] == "vision",
        )

    window, own = facts["sliding_window"], (facts["head_dim"], facts["num_key_value_heads"])
    return GemmaSize(
        facts["hidden_size"],
        facts["intermediate_size"],
        facts["vocab_size"],
        tuple(gemma_hf.KINDS[name] for name in facts["layer_types"]),
        heads("sliding_attention", own, window),
        heads("full_attention", facts["full_attention"], 0),
        norm_eps=facts["rms_norm_eps"],
        norm_around=0.0,
        value_norm=True,
        layer_scalar=True,
        cap=facts["final_logit_softcapping"] or 0.0,
        tied=facts["tie_word_embeddings"],
    )


def text_config(size: GemmaSize) -> dict[str, Any]:
    """The configuration of a decoder of Gemma 4, in the published form."""

    def rope(heads: HeadsSize) -> dict[str, Any]:
        if heads.turned is None and heads.factor == 1.0:
            return {"rope_type": "default", "rope_theta": heads.theta}
        turned = heads.head_dim // 2 if heads.turned is None else heads.turned
        share = {"partial_rotary_factor": turned / (heads.head_dim // 2)}
        factor = {"factor": heads.factor} if heads.factor != 1.0 else {}
        return {"rope_type": "proportional", "rope_theta": heads.theta, **share, **factor}

    return {
        "model_type": "gemma4_text",
        **gemma_hf.text_config(size),
        **_own_heads(size),
        "attention_k_eq_v": size.whole.values_are_keys,
        "use_bidirectional_attention": "vision" if size.sliding.pictures else None,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": rope(size.whole),
            "sliding_attention": rope(size.sliding),
        },
    }


def _own_heads(size: GemmaSize) -> dict[str, Any]:
    """Heads of global layers, in the published form where that can say them."""
    whole = size.whole
    if whole.values_are_keys:
        heads = whole.head_dim, whole.n_kv_heads
        return dict(zip(("global_head_dim", "num_global_key_value_heads"), heads, strict=True))
    own = {"head_dim": whole.head_dim, "num_key_value_heads": whole.n_kv_heads}
    return {"per_layer_config": {str(i): own for i, k in enumerate(size.kinds) if k == GLOBAL}}


def facts_of(config: Config) -> dict[str, Any]:
    """Of a `gemma4` configuration."""
    text = dict(config.get("text_config") or {})
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
    if config.get("audio_config"):
        raise ValueError("audio_config: sound is not built for Gemma 4; its dense form has none")
    facts = {f"text_config.{k}": v for k, v in text_facts(text).items()}
    given = config.get("vision_config")
    if given is None:
        return facts | {"vision_config": None}
    vision = {key: given.get(key, default) for key, default in VISION.items()}
    only = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False, None)}
    gemma_hf.check_only(vision, only)
    rope = given.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ValueError(f"vision_config.rope_parameters: {rope}; only axial ones are built")
    vision["rope_theta"] = float(rope.get("rope_theta", 100.0))
    vision["attention_bias"] = bool(vision["attention_bias"])
    return facts | {f"vision_config.{k}": v for k, v in vision.items()}


def read(config: Config) -> Gemma4Size:
    """Size of a `gemma4` configuration."""
    facts = facts_of(config)
    below = {p: {k.removeprefix(f"{p}."): v for k, v in facts.items() if k.startswith(f"{p}.")}
             for p in ("text_config", "vision_config")}  # fmt: skip
    decoder, v = text_size(below["text_config"]), below["vision_config"]
    if not v:
        return Gemma4Size(decoder)
    return Gemma4Size(decoder, Gemma4VisionSize(**fields_of(v, VISION_KEYS), theta=v["rope_theta"]))


def read_text(config: Config) -> Gemma4Size:
    """Size of a `gemma4_text` configuration."""
    return Gemma4Size(text_size(text_facts(config)))


READERS: Mapping[str, Callable[[Config], Gemma4Size]] = {"gemma4": read, "gemma4_text": read_text}


def vision_config(v: Gemma4VisionSize) -> dict[str, Any]:
    """The configuration of a tower."""
    return {
        "model_type": "gemma4_vision",
        **stated(v, VISION_KEYS),
        "rope_parameters": {"rope_type": "axial", "rope_theta": v.theta},
    }


# ---- checkpoints ----


def weights(modules: Mapping[str, Any], size: Gemma4Size, *, alone: bool) -> HfWeightMap:
    """Gemma4ForConditionalGeneration, or Gemma4ForCausalLM of a decoder that is `alone`."""
    decoder, llm = size.decoder, modules["llm"]
    if alone:
        return HfWeightMap(
            tensors=tuple(gemma_hf.llm_tensors(llm, "model.", "")),
            config={**text_config(decoder), "architectures": ["Gemma4ForCausalLM"]},
            config_rules=Facts(text_facts),
            ignored=(INV_FREQ,),
            copies=gemma_hf.copies(decoder, "model.", ""),
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
        config_rules=Facts(facts_of),
        ignored=(INV_FREQ,),
        copies=gemma_hf.copies(decoder, body, ""),
    )
