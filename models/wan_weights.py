"""The tensors of diffusers' WanTransformer3DModel in the generator's parameters."""

from __future__ import annotations

from typing import Any

from models.hf_tensors import HfReshaping, HfTensor, HfWeightMap, Rule, tensors_of
from models.wan_sizes import CONFIG_RULES, WanSize, wan_config

STEM = "diffusion_pytorch_model"  # of the names of files

_OURS_AND_THEIRS = {
    "entry": {
        "text_hidden": "condition_embedder.text_embedder.linear_1",
        "text_out": "condition_embedder.text_embedder.linear_2",
        "time_hidden": "condition_embedder.time_embedder.linear_1",
        "time_out": "condition_embedder.time_embedder.linear_2",
        "shifts": "condition_embedder.time_proj",
    },
    "layers": {
        **{
            f"{ours}_{part}": f"blocks.{{}}.{theirs}.{name}"
            for ours, theirs in (("self", "attn1"), ("cross", "attn2"))
            for part, name in {
                "query": "to_q",
                "key": "to_k",
                "value": "to_v",
                "query_norm": "norm_q",
                "key_norm": "norm_k",
                "out": "to_out.0",
            }.items()
        },
        "cross_norm": "blocks.{}.norm2",
        "up": "blocks.{}.ffn.net.0.proj",
        "down": "blocks.{}.ffn.net.2",
    },
    "exit": {"out": "proj_out"},
}
_TABLE = "scale_shift_table"


def _rules() -> tuple[Rule, ...]:
    """A layer is a matrix or a norm's scale, and has a bias or none: what it lacks is left out."""
    rules = [
        Rule("entry", "patch/bias", "patch_embedding.bias"),
        Rule("layers", "modulation", f"blocks.{{}}.{_TABLE}", "one_leading"),
        Rule("exit", "modulation", _TABLE, "one_leading"),
    ]
    for part, names in _OURS_AND_THEIRS.items():
        for ours, theirs in names.items():
            layout = "heads_linear" if theirs.endswith("to_out.0") else "linear"
            rules += [
                Rule(part, f"{ours}/kernel", f"{theirs}.weight", layout),
                Rule(part, f"{ours}/scale", f"{theirs}.weight"),
                Rule(part, f"{ours}/bias", f"{theirs}.bias"),
            ]
    return tuple(rules)


def _patch(size: WanSize) -> HfTensor:
    """The patches' kernel [time x row x column x channel, width], in the file a convolution
    [width, channel, time, row, column]."""
    dims = ((size.width,), (size.channels,), *((n,) for n in size.patch))
    layout = HfReshaping(dims, (2, 3, 4, 1, 0), (size.patch_values, size.width))
    return HfTensor(
        "patch_embedding.weight", "generator", "entry", ("patch", "kernel"), None, layout
    )


def weight_map(module: Any) -> HfWeightMap:
    """All tensors of diffusers' WanTransformer3DModel, for the module "generator"."""
    return HfWeightMap(
        tensors=(_patch(module.size), *tensors_of(module, "generator", _rules(), "")),
        config=wan_config(module.size),
        config_rules=CONFIG_RULES,
        stem=STEM,
    )
