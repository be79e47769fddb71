"""Names of the parameters in the checkpoints of transformers, one table per module."""

from __future__ import annotations

from collections.abc import Sequence

from models.hf_tensors import Rule


def _norm(part: str, ours: str, theirs: str) -> tuple[Rule, Rule]:
    """A norm's scale and, where it has one, its bias."""
    return Rule(part, f"{ours}/scale", f"{theirs}.weight"), Rule(
        part, f"{ours}/bias", f"{theirs}.bias"
    )


def _linear(part: str, ours: str, theirs: str, layout: str = "linear") -> tuple[Rule, Rule]:
    """A matrix and, where it has one, its bias."""
    return Rule(part, f"{ours}/kernel", f"{theirs}.weight", layout), Rule(
        part, f"{ours}/bias", f"{theirs}.bias"
    )


# Qwen2, Qwen3 and Llama; the head has a prefix of its own.
DECODER = (
    Rule("entry", "embedding", "embed_tokens.weight", "same"),
    *_norm("layers", "attn_norm", "layers.{}.input_layernorm"),
    *_linear("layers", "query", "layers.{}.self_attn.q_proj"),
    *_linear("layers", "key", "layers.{}.self_attn.k_proj"),
    *_linear("layers", "value", "layers.{}.self_attn.v_proj"),
    *_norm("layers", "query_norm", "layers.{}.self_attn.q_norm"),
    *_norm("layers", "key_norm", "layers.{}.self_attn.k_norm"),
    *_linear("layers", "out", "layers.{}.self_attn.o_proj", "heads_linear"),
    *_norm("layers", "mlp_norm", "layers.{}.post_attention_layernorm"),
    *_linear("layers", "gate", "layers.{}.mlp.gate_proj"),
    *_linear("layers", "up", "layers.{}.mlp.up_proj"),
    *_linear("layers", "down", "layers.{}.mlp.down_proj"),
    *_norm("exit", "norm", "norm"),
)
NEWLINE = (Rule("entry", "image_newline", "image_newline", "same"),)
HEAD = (Rule("exit", "head", "lm_head.weight", "same"),)

SIGLIP = (
    *_linear("entry", "patch", "embeddings.patch_embedding", "patch"),
    Rule("entry", "position", "embeddings.position_embedding.weight", "same"),
    *_norm("layers", "attn_norm", "encoder.layers.{}.layer_norm1"),
    *_linear("layers", "query", "encoder.layers.{}.self_attn.q_proj"),
    *_linear("layers", "key", "encoder.layers.{}.self_attn.k_proj"),
    *_linear("layers", "value", "encoder.layers.{}.self_attn.v_proj"),
    *_linear("layers", "out", "encoder.layers.{}.self_attn.out_proj", "heads_linear"),
    *_norm("layers", "mlp_norm", "encoder.layers.{}.layer_norm2"),
    *_linear("layers", "up", "encoder.layers.{}.mlp.fc1"),
    *_linear("layers", "down", "encoder.layers.{}.mlp.fc2"),
    *_norm("exit", "post_norm", "post_layernorm"),
)

INTERNVIT = (
    Rule("entry", "class_token", "embeddings.cls_token", "two_leading"),
    *_linear("entry", "patch", "embeddings.patch_embeddings.projection", "patch"),
    Rule("entry", "position", "embeddings.position_embeddings", "one_leading"),
    *_norm("layers", "attn_norm", "encoder.layer.{}.layernorm_before"),
    *_linear("layers", "query", "encoder.layer.{}.attention.q_proj"),
    *_linear("layers", "key", "encoder.layer.{}.attention.k_proj"),
    *_linear("layers", "value", "encoder.layer.{}.attention.v_proj"),
    *_norm("layers", "query_norm", "encoder.layer.{}.attention.q_norm"),
    *_norm("layers", "key_norm", "encoder.layer.{}.attention.k_norm"),
    *_linear("layers", "out", "encoder.layer.{}.attention.projection_layer", "heads_linear"),
    Rule("layers", "attn_scale/scale", "encoder.layer.{}.lambda_1"),
    *_norm("layers", "mlp_norm", "encoder.layer.{}.layernorm_after"),
    *_linear("layers", "up", "encoder.layer.{}.mlp.fc1"),
    *_linear("layers", "down", "encoder.layer.{}.mlp.fc2"),
    Rule("layers", "mlp_scale/scale", "encoder.layer.{}.lambda_2"),
)

WHISPER = (
    *_linear("entry", "conv1", "conv1", "conv"),
    *_linear("entry", "conv2", "conv2", "conv"),
    Rule("entry", "bias", "embed_positions.weight", "same"),
    *_norm("layers", "attn_norm", "layers.{}.self_attn_layer_norm"),
    *_linear("layers", "query", "layers.{}.self_attn.q_proj"),
    *_linear("layers", "key", "layers.{}.self_attn.k_proj"),
    *_linear("layers", "value", "layers.{}.self_attn.v_proj"),
    *_linear("layers", "out", "layers.{}.self_attn.out_proj", "heads_linear"),
    *_norm("layers", "mlp_norm", "layers.{}.final_layer_norm"),
    *_linear("layers", "up", "layers.{}.fc1"),
    *_linear("layers", "down", "layers.{}.fc2"),
    *_norm("exit", "norm", "layer_norm"),
)


def _merger(part: str, prefix: str) -> tuple[Rule, ...]:
    return (
        *_norm(part, "norm", f"{prefix}.norm"),
        *_linear(part, "hidden", f"{prefix}.linear_fc1"),
        *_linear(part, "out", f"{prefix}.linear_fc2"),
    )


def qwen3_vl_tower(taps: Sequence[str]) -> tuple[Rule, ...]:
    """The tower with its mergers: the last one, and those of its taps, in their order."""
    deepstack = (_merger(tap, f"deepstack_merger_list.{i}") for i, tap in enumerate(taps))
    return (
        *_linear("entry", "patch", "patch_embed.proj", "clip_patch"),
        Rule("entry", "position", "pos_embed.weight", "same"),
        *_norm("layers", "attn_norm", "blocks.{}.norm1"),
        *_linear("layers", "qkv", "blocks.{}.attn.qkv"),
        *_linear("layers", "out", "blocks.{}.attn.proj", "heads_linear"),
        *_norm("layers", "mlp_norm", "blocks.{}.norm2"),
        *_linear("layers", "up", "blocks.{}.mlp.linear_fc1"),
        *_linear("layers", "down", "blocks.{}.mlp.linear_fc2"),
        *_merger("exit", "merger"),
        *(rule for rules in deepstack for rule in rules),
    )


# Connectors, under "multi_modal_projector.".
MLP = (*_linear("exit", "hidden", "linear_1"), *_linear("exit", "out", "linear_2"))
NORMED_MLP = (*_norm("exit", "merged_norm", "layer_norm"), *MLP)
ONE_LINEAR = _linear("exit", "out", "linear")
