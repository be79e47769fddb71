"""Random folders of Qwen3.5 as transformers writes them, every tensor off its start, and with the
tensors that predict further tokens, which transformers leaves out."""

import json

import numpy as np
from safetensors.numpy import save_file

from .folders import load
from .gemma_folders import randomise, transformers_

INDEX, MORE = "model.safetensors.index.json", "model-mtp.safetensors"
TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "patch_size": 4,
         "num_position_embeddings": 25}  # fmt: skip
ONES = ("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight", "dt_bias")


def text(**more):
    """A `qwen3_5_text` configuration: numbers of heads of their own."""
    linear, full = "linear_attention", "full_attention"
    return {
        "vocab_size": 300, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "layer_types": [linear, full, linear], "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3,
                            "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
        **more,
    }  # fmt: skip


def value_of(name, shape, rng):
    """Small enough that no state is next to nothing: a norm would make much of its rounding, here
    and there."""
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.01, 16.0, shape))
    if len(shape) < 2:
        return 0.2 * rng.normal(size=shape) + name.endswith(ONES)
    return 0.3 * rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))


def write(path, model, seed=0, dtype="float32"):
    """A folder of the model in several files, with `mtp.*` in one of its own."""
    rng = np.random.default_rng(seed)
    randomise(model, value_of, rng)
    model.to(getattr(load("torch"), dtype)).save_pretrained(path, max_shard_size="60KB")
    more = {f"mtp.{name}": rng.normal(size=(3, 4)).astype(np.float32) for name in ("fc", "norm")}
    save_file(more, path / MORE, metadata={"format": "pt"})
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(more, MORE)
    (path / INDEX).write_text(json.dumps(index))
    return path


def qwen3_5(path, seed=0, dtype="float32", tied=False, vision=(), **more):
    tower = TOWER | dict(vision) | {"out_hidden_size": text(**more)["hidden_size"]}
    config = transformers_().Qwen3_5Config(
        text_config=text(**more), vision_config=tower, tie_word_embeddings=tied
    )
    return write(path, transformers_().Qwen3_5ForConditionalGeneration(config), seed, dtype)


def qwen3_5_text(path, seed=0, dtype="float32", tied=False, **more):
    config = transformers_().Qwen3_5TextConfig(**text(**more), tie_word_embeddings=tied)
    return write(path, transformers_().Qwen3_5ForCausalLM(config), seed, dtype)
