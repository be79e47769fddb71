"""A published model's folder as `transformers` writes it, small and random, and data for it."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.data.media.test_native import QWEN, SPECIAL
from tests.data.media_cases import noise, talk
from tests.data.text.test_chat import write as write_tokenizer

VOCAB = 512
PATCH, MERGE = 4, 2
PIXELS = 256, 4096  # of a picture, at least and at most
HF_CONFIG: dict[str, Any] = {
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
    "tie_word_embeddings": False,
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": PIXELS[0], "longest_edge": PIXELS[1]},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def transformers() -> Any:
    """The package; what its import warns of is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformers")


def processor_files(folder: Path) -> Path:
    """Tokenizer, template and preprocessor beside a config.json, and that."""
    write_tokenizer(folder, template=QWEN, special=SPECIAL)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    if not (folder / "config.json").exists():
        config = {"model_type": "qwen3_vl", **HF_CONFIG}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def qwen3_vl_folder(folder: Path) -> Path:
    """A random Qwen3-VL of two layers each, as `save_pretrained` writes it, and its processors."""
    hf = transformers()
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    ids = {"image_token_id": SPECIAL.index("<|image_pad|>"), "vision_start_token_id": 0}
    model = hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(**HF_CONFIG, **ids))
    for parameter in model.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape) + (parameter.ndim == 1)
    model.save_pretrained(folder)
    return processor_files(folder)


def llava_data(folder: Path, n: int = 24) -> Path:
    """A LLaVA-format folder: text alone, one picture, two pictures, of many sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for k in range(n):
        names = [f"p{k}-{j}.png" for j in range(k % 3)]
        for j, name in enumerate(names):
            Image.fromarray(noise(20 + 7 * k % 50, 24 + 11 * (k + j) % 70)).save(folder / name)
        question = " and ".join(["<image>"] * len(names)) + f" What is number {k}?"
        answers = talk(question, f"It is {k}. The quick fox.", "Why?", "Because. " * (1 + k % 5))
        records.append(
            {"id": f"r{k}", "conversations": answers, **({"image": names} if names else {})}
        )
    (folder / "train.json").write_text(json.dumps(records))
    return folder / "train.json"


def reference_loss(folder: Path, records: list[dict[str, Any]], media: Path) -> float:
    """The mean loss of all answer tokens of the records: of transformers' tokenizer, template,
    picture processor and model."""
    hf = transformers()
    torch = importlib.import_module("torch")
    pil = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(str(folder))
    pictures = pil.Qwen2VLImageProcessorPil(**{
        k: v for k, v in PREPROCESSOR.items() if k != "image_processor_type"
    })  # fmt: skip
    model = hf.Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    model.config.image_token_id = pad
    total, count = 0.0, 0
    for record in records:
        chat = []
        for turn in record["conversations"]:
            role = {"human": "user", "gpt": "assistant"}[turn["from"]]
            parts = re.split("(<image>)", turn["value"])
            content = [
                {"type": "image"} if p == "<image>" else {"type": "text", "text": p}
                for p in parts
                if p
            ]
            one = len(content) == 1 and content[0]["type"] == "text"
            chat.append({"role": role, "content": content[0]["text"] if one else content})
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        given: dict[str, Any] = {}
        if names := record.get("image"):
            images = [Image.open(media / n).convert("RGB") for n in names]
            given = dict(pictures(images, return_tensors="pt"))
            sizes = (given["image_grid_thw"].prod(-1) // MERGE**2).tolist()
            first, *rest = text.split("<|image_pad|>")
            text = first + "".join(n * "<|image_pad|>" + r for n, r in zip(sizes, rest))
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ids = torch.tensor(encoded["input_ids"])[None]
        spans = [m.span(1) for m in re.finditer(
            r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)]  # fmt: skip
        answer = np.array([any(a <= b < z for a, z in spans) for b, _ in encoded["offset_mapping"]])
        types = (ids == pad).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=types, **given).logits[0]
        losses = torch.nn.functional.cross_entropy(
            logits[:-1], ids[0, 1:], reduction="none"
        ).numpy()
        total += float(losses[answer[1:]].sum())
        count += int(answer[1:].sum())
    return total / count
