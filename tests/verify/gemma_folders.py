"""Random folders of Gemma as transformers writes them: every tensor and buffer off its start."""

import numpy as np

from .folders import load


def transformers_():
    return load("transformers", "5.24")


ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
ROPE4 = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                       "rope_theta": 2e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 4,
    "vision_use_head": False,
}  # fmt: skip
TOWER4 = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64,
    "use_clipped_linears": True, "standardize": True,
}  # fmt: skip
TEXT = {
    "vocab_size": 300, "hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9, "max_position_embeddings": 512,
}  # fmt: skip


def text3(**more):
    """A `gemma3_text` configuration with all that differs from others in it."""
    rope = {k: dict(v) for k, v in ROPE.items()}
    return {
        **TEXT, "num_hidden_layers": 7, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3,
        "rope_parameters": rope, **more,
    }  # fmt: skip


def text4(**more):
    """A `gemma4_text` configuration of the dense form, as published."""
    return {
        **TEXT, "num_hidden_layers": 6, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "final_logit_softcapping": 3.0, "num_kv_shared_layers": 0,
        "layer_types": ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(6)],
        "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0,
        "rope_parameters": {k: dict(v) for k, v in ROPE4.items()}, **more,
    }  # fmt: skip


def value_of(name, shape, rng, scale_one):
    """Of a tensor or buffer."""
    if name.endswith("layer_scalar"):
        return rng.uniform(0.1, 1.0, shape)
    if name.endswith(("input_min", "output_min")):
        return -rng.uniform(0.5, 1.5, shape)
    if name.endswith(("input_max", "output_max", "std_scale")):
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")) and scale_one:
        # As trained: with 1 both sides are chaotic, transformers itself is 3e-4 off float64.
        return 0.1 * rng.normal(size=shape) + 0.4
    if len(shape) < 2:
        return 0.2 * rng.normal(size=shape) + ("norm" in name)
    return rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))


def randomise(model, draw, rng):
    """The model with drawn values of (name, shape); what is no part of a folder stays."""
    torch, saved = load("torch"), set(model.state_dict())
    with torch.no_grad():
        for name, a in (*model.named_parameters(), *model.named_buffers()):
            if name in saved:
                values = np.asarray(draw(name, tuple(a.shape), rng), np.float32)
                a.copy_(torch.from_numpy(values))
    return model


def write(path, model, *, seed=0, dtype="float32", shard="100KB"):
    """A folder of the model, in several files."""
    scale_one = "gemma4" in model.config.model_type  # of products of queries and keys
    randomise(model, lambda *a: value_of(*a, scale_one), np.random.default_rng(seed))
    model.to(getattr(load("torch"), dtype)).save_pretrained(path, max_shard_size=shard)
    return path


def gemma3_text(path, seed=0, dtype="float32", **more):
    hf = transformers_()
    model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**text3(**more)))
    return write(path, model, seed=seed, dtype=dtype)


def gemma3(path, seed=0, dtype="float32", vision=(), tokens=16, **more):
    hf = transformers_()
    config = hf.Gemma3Config(
        text_config=text3(**more), vision_config=SIGLIP | dict(vision), mm_tokens_per_image=tokens
    )
    return write(path, hf.Gemma3ForConditionalGeneration(config), seed=seed, dtype=dtype)


def gemma4_text(path, seed=0, dtype="float32", **more):
    hf = transformers_()
    model = hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**text4(**more)))
    return write(path, model, seed=seed, dtype=dtype)


def gemma4(path, seed=0, dtype="float32", vision=(), **more):
    hf = transformers_()
    config = hf.Gemma4Config(
        text_config=text4(**more), vision_config=TOWER4 | dict(vision), audio_config=None
    )
    return write(path, hf.Gemma4ForConditionalGeneration(config), seed=seed, dtype=dtype)
