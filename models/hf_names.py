"""Names of the parameters in the checkpoints of transformers, one table per module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from models.hf_tensors import Rule


def module_rules(
    part: str, prefix: str, names: Mapping[str, str], layout: str = "linear"
) -> tuple[Rule, ...]:
    """Return rules of a part's matrices and norms: a kernel or scale each and perhaps a bias; a
    module may lack some. In layers, whose prefix has a place for their number, matrices named "out"
    join the heads."""
    rules = []
    for ours, theirs in names.items():
        joins_heads = "{}" in prefix and ours.endswith("out")
        theirs = prefix + theirs
        rules += [
            Rule(
                part,
                f"{ours}/kernel",
                f"{theirs}.weight",
                "heads_linear" if joins_heads else layout,
            ),
            Rule(part, f"{ours}/scale", f"{theirs}.weight"),
            Rule(part, f"{ours}/bias", f"{theirs}.bias"),
        ]
    return tuple(rules)


QKV = {name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")}
QKV_NORMED = {**QKV, "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
GATED_MLP = {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
EMBEDDING = Rule("entry", "embedding", "embed_tokens.weight", "same")
# Qwen2, Qwen3 and Llama; the head has its own prefix.
DECODER = (
    EMBEDDING,
    *module_rules("layers", "layers.{}.", {
        "attn_norm": "input_layernorm", **QKV_NORMED, "out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm", **GATED_MLP,
    }),
    *module_rules("exit", "", {"norm": "norm"}),
)  # fmt: skip
NEWLINE = (Rule("entry", "image_newline", "image_newline", "same"),)
HEAD = (Rule("exit", "head", "lm_head.weight", "same"),)

SIGLIP = (
    *module_rules("entry", "embeddings.", {"patch": "patch_embedding"}, "patch"),
    Rule("entry", "position", "embeddings.position_embedding.weight", "same"),
    *module_rules("layers", "encoder.layers.{}.", {
        "attn_norm": "layer_norm1", **QKV, "out": "self_attn.out_proj",
        "mlp_norm": "layer_norm2", "up": "mlp.fc1", "down": "mlp.fc2",
    }),
    *module_rules("exit", "", {"post_norm": "post_layernorm"}),
)  # fmt: skip

_INTERNVIT_LAYER = "encoder.layer.{}."
INTERNVIT = (
    Rule("entry", "class_token", "embeddings.cls_token", "two_leading"),
    *module_rules("entry", "embeddings.", {"patch": "patch_embeddings.projection"}, "patch"),
    Rule("entry", "position", "embeddings.position_embeddings", "one_leading"),
    *module_rules("layers", _INTERNVIT_LAYER, {
        "attn_norm": "layernorm_before",
        **{ours: theirs.replace("self_attn", "attention") for ours, theirs in QKV_NORMED.items()},
        "out": "attention.projection_layer",
        "mlp_norm": "layernorm_after", "up": "mlp.fc1", "down": "mlp.fc2",
    }),
    Rule("layers", "attn_scale/scale", f"{_INTERNVIT_LAYER}lambda_1"),
    Rule("layers", "mlp_scale/scale", f"{_INTERNVIT_LAYER}lambda_2"),
)  # fmt: skip

WHISPER = (
    *module_rules("entry", "", {"conv1": "conv1", "conv2": "conv2"}, "conv"),
    Rule("entry", "bias", "embed_positions.weight", "same"),
    *module_rules("layers", "layers.{}.", {
        "attn_norm": "self_attn_layer_norm", **QKV, "out": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm", "up": "fc1", "down": "fc2",
    }),
    *module_rules("exit", "", {"norm": "layer_norm"}),
)  # fmt: skip


def qwen3_vl_tower(taps: Sequence[str]) -> tuple[Rule, ...]:
    """Return rules of the tower with its mergers: the last one, then those of its taps in order."""
    mergers = {"exit": "merger."}
    mergers |= {tap: f"deepstack_merger_list.{i}." for i, tap in enumerate(taps)}
    merger = {"norm": "norm", "hidden": "linear_fc1", "out": "linear_fc2"}
    return (
        *module_rules("entry", "", {"patch": "patch_embed.proj"}, "clip_patch"),
        Rule("entry", "position", "pos_embed.weight", "same"),
        *module_rules("layers", "blocks.{}.", {
            "attn_norm": "norm1", "qkv": "attn.qkv", "out": "attn.proj",
            "mlp_norm": "norm2", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2",
        }),
        *(rule for part, prefix in mergers.items() for rule in module_rules(part, prefix, merger)),
    )  # fmt: skip


# Connectors, under "multi_modal_projector.".
MLP_CONNECTOR = module_rules("exit", "", {"hidden": "linear_1", "out": "linear_2"})
NORMED_MLP_CONNECTOR = (*module_rules("exit", "", {"merged_norm": "layer_norm"}), *MLP_CONNECTOR)
LINEAR_CONNECTOR = module_rules("exit", "", {"out": "linear"})
