"""Maps the tensors of diffusers' WanTransformer3DModel to the generator's parameters."""

from __future__ import annotations

from typing import Any

from models.hf_names import module_rules
from models.hf_tensors import HfReshaping, HfTensor, HfWeightMap, Rule, tensors_of
from models.wan_sizes import CONFIG_RULES, WanSize, wan_config

FILE_STEM = "diffusion_pytorch_model"  # start of file names

_ATTENTION = {
    "query": "to_q", "key": "to_k", "value": "to_v", "query_norm": "norm_q", "key_norm": "norm_k",
    "out": "to_out.0",
}  # fmt: skip
_TABLE = "scale_shift_table"
NAMES = (
    *module_rules("entry", "condition_embedder.", {
        "text_hidden": "text_embedder.linear_1",
        "text_out": "text_embedder.linear_2",
        "time_hidden": "time_embedder.linear_1",
        "time_out": "time_embedder.linear_2",
        "shifts": "time_proj",
    }),
    Rule("entry", "patch/bias", "patch_embedding.bias"),
    *module_rules("layers", "blocks.{}.", {
        **{f"self_{ours}": f"attn1.{theirs}" for ours, theirs in _ATTENTION.items()},
        **{f"cross_{ours}": f"attn2.{theirs}" for ours, theirs in _ATTENTION.items()},
        "cross_norm": "norm2",
        "up": "ffn.net.0.proj",
        "down": "ffn.net.2",
    }),
    Rule("layers", "modulation", f"blocks.{{}}.{_TABLE}", "one_leading"),
    *module_rules("exit", "", {"out": "proj_out"}),
    Rule("exit", "modulation", _TABLE, "one_leading"),
)  # fmt: skip


def _patch(size: WanSize) -> HfTensor:
    """Return the patch kernel, in the file a convolution [width, channel, time, row, column]."""
    dims = ((size.width,), (size.channels,), *((n,) for n in size.patch))
    layout = HfReshaping(dims, (2, 3, 4, 1, 0), (size.patch_values, size.width))
    return HfTensor(
        "patch_embedding.weight", "generator", "entry", ("patch", "kernel"), None, layout
    )


def weight_map(module: Any) -> HfWeightMap:
    """Return the map of diffusers' WanTransformer3DModel for the module "generator"."""
    return HfWeightMap(
        tensors=(_patch(module.size), *tensors_of(module, "generator", NAMES, "")),
        config=wan_config(module.size),
        config_rules=CONFIG_RULES,
        stem=FILE_STEM,
    )
