"""Folders of published families as `transformers` writes them, small and random, tokenizer,
template and picture processor beside: for the cases of ../shared/data/reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.data.media.test_native import SPECIAL
from tests.data.text import test_chat
from tests.front.made import HF_CONFIG, VOCAB, processor_files
from tests.verify import gemma_folders
from tests.verify.folders import load

TILE, PATCH, MOST_TILES = 32, 8, 4  # LLaVA's, in pixels
GRIDS = [[TILE * rows, TILE * columns] for rows in range(1, 7) for columns in range(1, 7)]
BEGIN, PICTURE, END = "<boi>", "<picture>", "<eoi>"  # Gemma's
GEMMA_SPECIAL = ["<|endoftext|>", "<start_of_turn>", "<end_of_turn>", BEGIN, PICTURE, END]
GEMMA = """{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else
m.role) + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}
{%- if c.type == 'text' %}{{ c.text }}{% else %}{{ '<boi>' }}{% endif %}{% endfor %}{% endif %}
{{- '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
SIDE, SQUARE_TOKENS = 32, 16  # of Gemma 3's pictures
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _saved(model: Any, folder: Path) -> None:
    """Write the model with random parameters, those of one dimension about 1."""
    torch = load("torch")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape) + (parameter.ndim == 1)
    model.save_pretrained(folder)


def qwen3_vl(folder: Path) -> Path:
    hf = load("transformers")
    ids = {"image_token_id": SPECIAL.index("<|image_pad|>"), "vision_start_token_id": 0}
    _saved(hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(**HF_CONFIG, **ids)), folder)
    return processor_files(folder)


def llava(folder: Path) -> Path:
    """A LLaVA-OneVision."""
    hf = load("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64}  # fmt: skip
    text = {**sizes, "model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": VOCAB,
            "max_position_embeddings": 1024}  # fmt: skip
    vision = {**sizes, "model_type": "siglip_vision_model", "image_size": TILE,
              "patch_size": PATCH, "vision_use_head": False}  # fmt: skip
    config = hf.LlavaOnevisionConfig(
        vision_config=vision, text_config=text, image_grid_pinpoints=GRIDS,
        vision_aspect_ratio=f"anyres_max_{MOST_TILES}",
    )  # fmt: skip
    _saved(hf.LlavaOnevisionForConditionalGeneration(config), folder)
    test_chat.write(folder, template=test_chat.PARTS)
    size = {"height": TILE, "width": TILE}
    return _processor(folder, "LlavaOnevision", size=size, image_grid_pinpoints=GRIDS, **HALF)


def gemma3(folder: Path) -> Path:
    gemma_folders.gemma3(folder, vocab_size=VOCAB, num_hidden_layers=3, tokens=SQUARE_TOKENS)
    names = {"eos_token": "<end_of_turn>", "boi_token": BEGIN, "eoi_token": END}
    test_chat.write(folder, GEMMA, {**names, "image_token": PICTURE}, GEMMA_SPECIAL)
    return _processor(folder, "Gemma3", size={"height": SIDE, "width": SIDE})


def _processor(folder: Path, family: str, **settings: Any) -> Path:
    about = {"image_processor_type": f"{family}ImageProcessor", **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return folder
