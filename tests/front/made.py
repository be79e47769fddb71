"""The files beside a published Qwen3-VL's weights, small, and data for models of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from tests.data.media.test_native import QWEN, SPECIAL
from tests.data.media_cases import noise, talk
from tests.data.text.test_chat import write as write_tokenizer

VOCAB = 512
PATCH, MERGE = 4, 2
PIXELS = 256, 4096  # of a picture, at least and at most
HF_CONFIG: dict[str, Any] = {
    "text_config": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64,
        "out_hidden_size": 32, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    },
    "tie_word_embeddings": False,
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE,
    "size": {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]}, "temporal_patch_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def processor_files(folder: Path) -> Path:
    """Tokenizer, template and preprocessor beside a config.json, and that."""
    write_tokenizer(folder, template=QWEN, special=SPECIAL)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    if not (folder / "config.json").exists():
        config = {"model_type": "qwen3_vl", **HF_CONFIG}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def llava_data(folder: Path, n: int = 24, pictures: int = 2) -> Path:
    """A LLaVA-format folder: text alone, and one to so many pictures, of many sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for k in range(n):
        names = [f"p{k}-{j}.png" for j in range(k % (pictures + 1))]
        for j, name in enumerate(names):
            Image.fromarray(noise(20 + 7 * k % 50, 24 + 11 * (k + j) % 70)).save(folder / name)
        question = " and ".join(["<image>"] * len(names)) + f" What is number {k}?"
        answers = talk(question, f"It is {k}. The quick fox.", "Why?", "Because. " * (1 + k % 5))
        records.append(
            {"id": f"r{k}", "conversations": answers, **({"image": names} if names else {})}
        )
    (folder / "train.json").write_text(json.dumps(records))
    return folder / "train.json"
