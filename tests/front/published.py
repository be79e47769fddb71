"""Folders of published families as `transformers` writes them, small and random, tokenizer,
template and picture processor beside."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from tests.data.media.test_native import SPECIAL
from tests.data.text import test_chat
from tests.front.made import HF_CONFIG, MERGE, PREPROCESSOR, VOCAB, processor_files

TILE, PATCH, MOST_TILES = 32, 8, 4  # LLaVA's, in pixels
BEGIN, PICTURE, END = "<boi>", "<picture>", "<eoi>"  # Gemma's
GEMMA_SPECIAL = ["<|endoftext|>", "<start_of_turn>", "<end_of_turn>", BEGIN, PICTURE, END]
GEMMA = """{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else
m.role) + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}
{%- if c.type == 'text' %}{{ c.text }}{% else %}{{ 'PLACE' }}{% endif %}{% endfor %}{% endif %}
{{- '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
SIDE, SQUARE_TOKENS = 32, 16  # of Gemma 3's pictures
FITTED = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
GRIDS = [[TILE * rows, TILE * columns] for rows in range(1, 7) for columns in range(1, 7)]


# What the model is given of some pictures, and how many tokens each has.
Given = tuple[dict[str, Any], list[int]]


def _no_pictures(*_: object) -> Given:
    return {}, []


@dataclass(frozen=True)
class Family:
    """A published family."""

    write: Callable[[Path], Path]  # a random folder with tokenizer, template and processor
    pictures: Callable[..., Given] = _no_pictures  # of (folder, tokenizer, text, pictures)
    written: str = ""  # the template's text for a picture; "": the model takes none
    framed: tuple[str, str] = ("", "")  # around the tokens of a picture
    token: str = ""  # of a picture
    types: str = ""  # the argument that is 1 for these, where there is one
    # an answer of a rendered chat with what ends it, as the group
    answer: str = r"<\|im_start\|>assistant\s(.*?<\|im_end\|>)"


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
    hf = transformers()
    ids = {"image_token_id": SPECIAL.index("<|image_pad|>"), "vision_start_token_id": 0}
    _saved(hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(**HF_CONFIG, **ids)), folder)
    return processor_files(folder)


def _native(folder: Path, tokenizer: Any, text: str, images: Sequence[Image.Image]) -> Given:
    pil = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = pil.Qwen2VLImageProcessorPil(**_facts(PREPROCESSOR))
    given = dict(processor(list(images), return_tensors="pt"))
    return given, (given["image_grid_thw"].prod(-1) // MERGE**2).tolist()


def llava(folder: Path) -> Path:
    hf = transformers()
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
    about = {
        "image_processor_type": "LlavaOnevisionImageProcessor", "image_grid_pinpoints": GRIDS,
        "size": {"height": TILE, "width": TILE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return folder


def _tiled(folder: Path, tokenizer: Any, text: str, images: Sequence[Image.Image]) -> Given:
    """By the whole published processor."""
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
    from tests.verify import gemma_folders

    gemma_folders.gemma3_text(
        folder, vocab_size=VOCAB, num_hidden_layers=3, max_position_embeddings=1024
    )
    return test_chat.write(folder)


def qwen3_5(folder: Path) -> Path:
    from tests.verify import qwen3_5_folders

    qwen3_5_folders.qwen3_5(folder, vocab_size=VOCAB)
    return processor_files(folder)


def _gemma_files(folder: Path, place: str, preprocessor: Mapping[str, Any]) -> Path:
    names = {"eos_token": "<end_of_turn>", "boi_token": BEGIN, "eoi_token": END}
    test_chat.write(
        folder, GEMMA.replace("PLACE", place), {**names, "image_token": PICTURE}, GEMMA_SPECIAL
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def gemma3(folder: Path) -> Path:
    from tests.verify import gemma_folders

    gemma_folders.gemma3(folder, vocab_size=VOCAB, num_hidden_layers=3, tokens=SQUARE_TOKENS)
    size = {"height": SIDE, "width": SIDE}
    return _gemma_files(
        folder, BEGIN, {"image_processor_type": "Gemma3ImageProcessor", "size": size}
    )


def gemma4(folder: Path) -> Path:
    from tests.verify import gemma_folders

    kinds = gemma_folders.text4()["layer_types"][:3]
    gemma_folders.gemma4(folder, vocab_size=VOCAB, num_hidden_layers=3, layer_types=kinds)
    return _gemma_files(folder, PICTURE, {"image_processor_type": "Gemma4ImageProcessor", **FITTED})


def _gemma_processor(name: str, folder: Path, images: Sequence[Image.Image]) -> dict[str, Any]:
    pil = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    about = json.loads((folder / "preprocessor_config.json").read_text())
    processor = getattr(pil, f"{name.capitalize()}ImageProcessorPil")(**_facts(about))
    return dict(processor(list(images), return_tensors="pt"))


def _squares(folder: Path, tokenizer: Any, text: str, images: Sequence[Image.Image]) -> Given:
    pixels = _gemma_processor("gemma3", folder, images)["pixel_values"]
    return {"pixel_values": pixels}, [SQUARE_TOKENS] * len(images)


def _fitted(folder: Path, tokenizer: Any, text: str, images: Sequence[Image.Image]) -> Given:
    given = _gemma_processor("gemma4", folder, images)
    return given, [int(n) for n in given.pop("num_soft_tokens_per_image")]


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in about.items() if k != "image_processor_type"}


_PAD, _TYPES = "<|image_pad|>", "mm_token_type_ids"
_GEMMA_ANSWER = r"<start_of_turn>model\n(.*?<end_of_turn>)"
FAMILIES: Mapping[str, Family] = {
    "qwen3_vl": Family(qwen3_vl, _native, _PAD, token=_PAD, types=_TYPES),
    "llava_onevision": Family(llava, _tiled, "<image>", token="<image>"),
    "gemma3_text": Family(gemma3_text),
    "qwen3_5": Family(qwen3_5, _native, _PAD, token=_PAD, types=_TYPES),
    "gemma3": Family(
        gemma3, _squares, BEGIN, (f"\n\n{BEGIN}", f"{END}\n\n"), PICTURE, "token_type_ids",
        _GEMMA_ANSWER,
    ),
    "gemma4": Family(gemma4, _fitted, PICTURE, (BEGIN, END), PICTURE, _TYPES, _GEMMA_ANSWER),
}  # fmt: skip
