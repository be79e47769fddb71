"""Gemma 4's checkpoints of transformers, without experts, per-layer embeddings or sound: see
`models.gemma_hf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models import gemma_hf
from models.gemma_sizes import GLOBAL, Gemma4Size, Gemma4VisionSize, GemmaSize, HeadsSize
from models.hf import INV_FREQ
from models.hf_config import Config, Facts
from models.hf_tensors import HfWeightMap, Rule, tensors_of

# ---- names ----


def _clipped(ours: str, theirs: str, layout: str = "linear") -> tuple[Rule, ...]:
    """A matrix of the tower's layers and, where it is clipped, its bounds."""
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return (
        Rule("layers", f"{ours}/kernel", f"{theirs}.linear.weight", layout),
        *(Rule("layers", f"{ours}_{name}", f"{theirs}.{name}", "same") for name in bounds),
    )


def _scale(ours: str, theirs: str) -> Rule:
    return Rule("layers", f"{ours}/scale", f"{theirs}.weight")


_LAYER = "encoder.layers.{}"
TOWER = (
    Rule("entry", "patch/kernel", "patch_embedder.input_proj.weight", "patch_matrix"),
    Rule("entry", "position", "patch_embedder.position_embedding_table", "same"),
    _scale("attn_norm", f"{_LAYER}.input_layernorm"),
    *_clipped("query", f"{_LAYER}.self_attn.q_proj"),
    *_clipped("key", f"{_LAYER}.self_attn.k_proj"),
    *_clipped("value", f"{_LAYER}.self_attn.v_proj"),
    _scale("query_norm", f"{_LAYER}.self_attn.q_norm"),
    _scale("key_norm", f"{_LAYER}.self_attn.k_norm"),
    *_clipped("out", f"{_LAYER}.self_attn.o_proj", "heads_linear"),
    _scale("attn_out_norm", f"{_LAYER}.post_attention_layernorm"),
    _scale("mlp_norm", f"{_LAYER}.pre_feedforward_layernorm"),
    *_clipped("gate", f"{_LAYER}.mlp.gate_proj"),
    *_clipped("up", f"{_LAYER}.mlp.up_proj"),
    *_clipped("down", f"{_LAYER}.mlp.down_proj"),
    _scale("mlp_out_norm", f"{_LAYER}.post_feedforward_layernorm"),
    Rule("exit", "std_bias", "std_bias"),
    Rule("exit", "std_scale", "std_scale"),
)
PROJECTOR = (Rule("exit", "projection/kernel", "embedding_projection.weight", "linear"),)

# ---- configurations ----

TEXT: Config = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "attention_k_eq_v": False,
    "tie_word_embeddings": True,
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
    vision = Gemma4VisionSize(
        v["hidden_size"],
        v["num_hidden_layers"],
        v["num_attention_heads"],
        v["num_key_value_heads"],
        v["head_dim"],
        v["intermediate_size"],
        v["patch_size"],
        v["pooling_kernel_size"],
        v["position_embedding_size"],
        v["rope_theta"],
        v["rms_norm_eps"],
        v["use_clipped_linears"],
        v["standardize"],
    )
    return Gemma4Size(decoder, vision)


def read_text(config: Config) -> Gemma4Size:
    """Size of a `gemma4_text` configuration."""
    return Gemma4Size(text_size(text_facts(config)))


READERS: Mapping[str, Callable[[Config], Gemma4Size]] = {"gemma4": read, "gemma4_text": read_text}


def vision_config(v: Gemma4VisionSize) -> dict[str, Any]:
    """The configuration of a tower."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": v.width,
        "intermediate_size": v.mlp,
        "num_hidden_layers": v.n_layers,
        "num_attention_heads": v.n_heads,
        "num_key_value_heads": v.n_kv_heads,
        "head_dim": v.head_dim,
        "patch_size": v.patch_px,
        "pooling_kernel_size": v.merge,
        "position_embedding_size": v.side,
        "rope_parameters": {"rope_type": "axial", "rope_theta": v.theta},
        "rms_norm_eps": v.norm_eps,
        "use_clipped_linears": v.clipped,
        "standardize": v.standardized,
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
