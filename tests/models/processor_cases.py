"""Folders whose processor files have other settings than published, and what transformers' own
processors make of pictures by them."""

import dataclasses
import importlib
import json

import numpy as np
from PIL import Image

from dflop_jax.config import Config
from dflop_jax.preflight.derived_fields import with_settings
from dflop_jax.preflight.model_folder import factory_of, folder_settings
from dflop_jax.train.run_context import build_model
from models.composed import PublishedComposition
from models.gemma import Gemma3
from models.gemma4 import Gemma4
from models.gemma_sizes import GEMMA3, GEMMA4, Gemma3Size, Gemma4Size, Gemma4VisionSize
from models.sizes import AUDIO, DECODERS, ModelSize, VisionSize
from tests.data.media_cases import noise
from tests.front.made import HF_CONFIG
from tests.verify.folders import load

PX = 28  # of a tile
F32 = np.dtype(np.float32)
COLOURS = {"image_mean": [0.3, 0.4, 0.5], "image_std": [0.2, 0.3, 0.4], "rescale_factor": 1 / 200}
PIL_CLASSES = {
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil"),
    "gemma4": ("gemma4", "Gemma4ImageProcessorPil"),
}
SQUARE = {"size": {"height": PX, "width": PX}}
SETTINGS = {
    "qwen3_vl": {**COLOURS, "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
                 "size": {"shortest_edge": 700, "longest_edge": 5000}},
    "llava_onevision": {**COLOURS, **SQUARE,
                        "image_grid_pinpoints": [[PX, 2 * PX], [2 * PX, PX], [3 * PX, 2 * PX]]},
    "internvl": {**COLOURS, **SQUARE, "max_patches": 5},
    "gemma3": {**COLOURS, **SQUARE},
    "gemma4": {**COLOURS, "do_normalize": True, "patch_size": 4, "max_soft_tokens": 140},
}  # fmt: skip

UNTIED = dataclasses.replace(DECODERS["nano"], tied=False)
TOWER = VisionSize(PX, 14, 32, 1, 4, 64, post_norm=False)
INTERN_TOWER = dataclasses.replace(TOWER, merge=2, form="internvit")
GEMMA3_TOWER = dataclasses.replace(TOWER, post_norm=True)
GEMMA4_TOWER = Gemma4VisionSize(32, 1, 4, 4, 8, 64, patch_px=4, side=512)
SOUND = dataclasses.replace(AUDIO["whisper-nano"], frames=200, mel_bins=16)
MODELS = {
    "llava_onevision": PublishedComposition(ModelSize(UNTIED, TOWER, layout="anyres"), F32),
    "internvl": PublishedComposition(ModelSize(UNTIED, INTERN_TOWER, layout="dynamic"), F32),
    "gemma3": Gemma3(Gemma3Size(GEMMA3["gemma3-nano"].decoder, GEMMA3_TOWER), F32),
    "gemma4": Gemma4(Gemma4Size(GEMMA4["gemma4-nano"].decoder, GEMMA4_TOWER), F32),
    "qwen2_audio": PublishedComposition(ModelSize(UNTIED, audio=SOUND), F32),
}


def write_processors(folder, kind, pictures, clips=None):
    """(a folder of a model of a kind with these settings of its processors, its configuration)."""
    own = HF_CONFIG if kind == "qwen3_vl" else MODELS[kind].weights.config
    config = {"model_type": kind, **own}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    if clips is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(clips))
    return folder, config


def read_model(folder, config):
    """(the model of a folder, its limits), as a run of its own configuration has them."""
    factory = factory_of(config, folder)
    settings = folder_settings(folder, {"data.tokenizer"})
    ready = with_settings(Config(), [s for s in settings if s.name != "model.weights"])
    assert ready.model.factory == factory
    return build_model(ready.model), ready.data


def pictures(n=20):
    """Pictures of many shapes."""
    sizes = np.random.default_rng(1).integers(12, 130, (n, 2))
    return [Image.fromarray(noise(int(height), int(width))) for width, height in sizes]


def published_class(kind):
    """The class of transformers that prepares pictures of a kind."""
    model, name = PIL_CLASSES[kind]
    load("transformers")
    module = f"transformers.models.{model}.image_processing_pil_{model}"
    return getattr(importlib.import_module(module), name)


def published_values(kind):
    """(tokens of each picture where the processor says them, else -1; its values) by the settings
    of a kind."""
    crop = {"crop_to_patches": True} if kind == "internvl" else {}
    processor = published_class(kind)(**SETTINGS[kind], **crop)
    for picture in pictures():
        given = processor([picture], return_tensors="np")
        values, tokens = np.asarray(given["pixel_values"], np.float32), -1
        if kind == "qwen3_vl":
            tokens = int(given["image_grid_thw"].prod()) // 4
        elif kind == "gemma4":
            tokens = int(given["num_soft_tokens_per_image"][0])
            values = by_blocks(values[0], given["image_position_ids"][0], 3) * 2 - 1
        yield tokens, values


def by_blocks(patches, places, merge):
    """A Gemma 4's patches (row, column, colour) block by block, as ours (colour, row, column)."""
    real = places[:, 0] >= 0
    patches, (columns, rows) = patches[real], places[real].T
    order = np.lexsort((columns % merge, rows % merge, columns // merge, rows // merge))
    side = int((patches.shape[1] // 3) ** 0.5)
    split = patches[order].reshape(-1, side, side, 3)
    return split.transpose(0, 3, 1, 2).reshape(len(order), -1)
