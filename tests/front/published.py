"""Folders of published families as `transformers` writes them, small and random, and the loss that
its own tokenizer, template, processor and model have on records."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.data.media.test_native import SPECIAL
from tests.data.text import test_chat
from tests.front.made import HF_CONFIG, MERGE, PREPROCESSOR, VOCAB, processor_files

TILE, PATCH, MOST_TILES = 32, 8, 4  # LLaVA's, in pixels
GRIDS = [[TILE * rows, TILE * columns] for rows in range(1, 7) for columns in range(1, 7)]


@dataclass(frozen=True)
class Family:
    """A published family.

    Attributes:
      write: makes a random folder of it, with tokenizer, template and processor, and returns it.
      media: the token that a picture stands for; "" where the model takes none.
      pictures: of (folder, tokenizer, rendered text, pictures), what the model is given of them
        and how many tokens each has.
    """

    write: Callable[[Path], Path]
    media: str = ""
    pictures: Callable[..., tuple[dict[str, Any], list[int]]] = lambda *_: ({}, [])


def transformers() -> Any:
    """The package; what its import warns of is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformers")


def _saved(model: Any, folder: Path) -> None:
    """Write the model with random parameters, those of one dimension about 1."""
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape) + (parameter.ndim == 1)
    model.save_pretrained(folder)


def qwen3_vl(folder: Path) -> Path:
    """A Qwen3-VL of two layers each."""
    hf = transformers()
    ids = {"image_token_id": SPECIAL.index("<|image_pad|>"), "vision_start_token_id": 0}
    _saved(hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(**HF_CONFIG, **ids)), folder)
    return processor_files(folder)


def qwen3_vl_pictures(
    folder: Path, tokenizer: Any, text: str, images: Sequence[Image.Image]
) -> tuple[dict[str, Any], list[int]]:
    """Of `Family.pictures`."""
    pil = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = pil.Qwen2VLImageProcessorPil(**_facts(PREPROCESSOR))
    given = dict(processor(list(images), return_tensors="pt"))
    return given, (given["image_grid_thw"].prod(-1) // MERGE**2).tolist()


def llava(folder: Path) -> Path:
    """A LLaVA-OneVision of two layers each and tiles of 16 patches."""
    hf = transformers()
    text = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": TILE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    config = hf.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_grid_pinpoints=GRIDS,
        vision_aspect_ratio=f"anyres_max_{MOST_TILES}",
    )
    _saved(hf.LlavaOnevisionForConditionalGeneration(config), folder)
    test_chat.write(folder, template=test_chat.PARTS)
    about = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": TILE, "width": TILE},
        "image_grid_pinpoints": GRIDS,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return folder


def llava_pictures(
    folder: Path, tokenizer: Any, text: str, images: Sequence[Image.Image]
) -> tuple[dict[str, Any], list[int]]:
    """Of `Family.pictures`, by the whole published processor."""
    name = "transformers.models.llava_onevision."
    pil = importlib.import_module(f"{name}image_processing_pil_llava_onevision")
    whole = importlib.import_module(f"{name}processing_llava_onevision")

    class Processor(whole.LlavaOnevisionProcessor):
        def check_argument_for_proper_class(self, *_: object) -> type:
            return object  # it would ask for torchvision, for videos alone

    about = json.loads((folder / "preprocessor_config.json").read_text())
    processor = Processor(
        pil.LlavaOnevisionImageProcessorPil(**_facts(about)), tokenizer, None,
        num_image_tokens=(TILE // PATCH) ** 2, vision_feature_select_strategy="full",
        vision_aspect_ratio=f"anyres_max_{MOST_TILES}",
    )  # fmt: skip
    # A list in a list: pictures of one sample, of which several are a tile each.
    given = dict(processor(images=[list(images)], text=[text], return_tensors="pt"))
    pad = tokenizer.convert_tokens_to_ids("<image>")
    runs = groupby(given.pop("input_ids")[0].tolist())
    given.pop("attention_mask")
    return given, [len(list(run)) for token, run in runs if token == pad]


def gemma3_text(folder: Path) -> Path:
    """A text-only Gemma 3: layers of both kinds, a window of 9 tokens."""
    from tests.verify import gemma_folders

    gemma_folders.gemma3_text(
        folder, vocab_size=VOCAB, num_hidden_layers=3, max_position_embeddings=1024
    )
    return test_chat.write(folder)


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in about.items() if k != "image_processor_type"}


FAMILIES: Mapping[str, Family] = {
    "qwen3_vl": Family(qwen3_vl, "<|image_pad|>", qwen3_vl_pictures),
    "llava_onevision": Family(llava, "<image>", llava_pictures),
    "gemma3_text": Family(gemma3_text),
}


def reference_loss(folder: Path, records: Sequence[dict[str, Any]], media: Path) -> float:
    """The mean loss of all answer tokens of the records: of transformers' tokenizer, template,
    picture processor and model.

    Args:
      folder: of one of `FAMILIES`.
      media: the folder of the records' pictures.
    """
    hf = transformers()
    torch = importlib.import_module("torch")
    about = json.loads((folder / "config.json").read_text())
    family = FAMILIES[about["model_type"]]
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(str(folder))
    model = getattr(hf, about["architectures"][0]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    pad = tokenizer.convert_tokens_to_ids(family.media) if family.media else -1
    model.config.image_token_id = pad
    total, count = 0.0, 0
    for record in records:
        text = tokenizer.apply_chat_template(_chat(record), tokenize=False)
        given: dict[str, Any] = {}
        sizes: list[int] = []
        if names := record.get("image"):
            images = [Image.open(media / n).convert("RGB") for n in names]
            given, sizes = family.pictures(folder, tokenizer, text, images)
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        spans = [m.span(1) for m in re.finditer(
            r"<\|im_start\|>assistant\s(.*?<\|im_end\|>)", text, re.DOTALL)]  # fmt: skip
        answer = np.array([any(a <= b < z for a, z in spans) for b, _ in encoded["offset_mapping"]])
        ids = np.array(encoded["input_ids"])
        times = np.ones(len(ids), int)
        times[ids == pad] = sizes  # a picture's token stands there so often
        ids, answer = np.repeat(ids, times), np.repeat(answer, times)
        if family is FAMILIES["qwen3_vl"]:
            given["mm_token_type_ids"] = torch.from_numpy((ids == pad).astype(np.int32))[None]
        tokens = torch.from_numpy(ids)[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, **given).logits[0]
        losses = torch.nn.functional.cross_entropy(
            logits[:-1], tokens[0, 1:], reduction="none"
        ).numpy()
        total += float(losses[answer[1:]].sum())
        count += int(answer[1:].sum())
    return total / count


def _chat(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a record, with parts where it has pictures."""
    chat = []
    for turn in record["conversations"]:
        role = {"human": "user", "gpt": "assistant"}[turn["from"]]
        parts = [p for p in re.split("(<image>)", turn["value"]) if p]
        content = [
            {"type": "image"} if p == "<image>" else {"type": "text", "text": p} for p in parts
        ]
        plain = len(content) == 1 and content[0]["type"] == "text"
        chat.append({"role": role, "content": content[0]["text"] if plain else content})
    return chat
