"""Default settings of a run: those from a published model's folder (factory, size, weights,
tokenizer and limits), and values that suit training a pretrained model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dflop_jax.data.text.tokenize import BYTE_TOKENIZER, read_json
from dflop_jax.preflight.derived_fields import Setting
from dflop_jax.weights import read_config

TOKENIZER, CONFIG = "tokenizer.json", "config.json"
PICTURE_PROCESSOR, CLIP_PROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json"
ALL_PROCESSORS = "processor_config.json"
# model_type of a folder's config.json -> factory of the model, a line per family.
FAMILIES: Mapping[str, str] = {
    "llava_onevision": "models.llava:build",
    "internvl": "models.internvl:build",
    "qwen2_audio": "models.qwen2_audio:build",
    "qwen3_vl": "models.qwen3_vl:build",
    "gemma3": "models.gemma:build",
    "gemma3_text": "models.gemma:build_text",
    "qwen3_5": "models.qwen3_5:build",
    "qwen3_5_text": "models.qwen3_5:build_text",
    "gemma4": "models.gemma4:build",
    "gemma4_text": "models.gemma4:build_text",
}
MEDIA_CONFIGS = ("vision_config", "audio_config")
ANYRES_MAX = "anyres_max_"  # vision_aspect_ratio: this prefix and the maximum number of tiles
# Longer samples are cut unless the user sets a higher limit. Otherwise the longest sample would
# determine the memory of a plan; a sample of twice the tokens takes up to four times the attention.
MAX_TOKENS = 8192
# Usual learning rates for fine-tuning: adapters start at zero and use ten times the rate of full
# weights.
FULL_RATE, LORA_RATE = 1e-5, 1e-4
WARMUP_RATIO = 0.03  # share of the steps
MAX_NAME_CHARS = 40  # characters of a model's or dataset's name in a folder's name
SNAPSHOTS = "snapshots"  # the hub's cache has models--OWNER--NAME/snapshots/REVISION
NOT_IN_NAMES = re.compile(r"[^\w.-]+")


def folder_settings(folder: Path, given_fields: Collection[str] = ()) -> list[Setting]:
    """Return the settings from a folder that `transformers` wrote, which need not have those in
    `given_fields`. ValueError: no such folder, no config.json, an unknown model, no tokenizer."""
    config, name, settings = read_config(folder), str(folder), []
    if "model.factory" not in given_fields:
        factory = factory_of(config, folder)
        settings.append(Setting("model.factory", factory, f"model_type of {CONFIG}"))
    settings += [
        Setting("model.size", name, f"{CONFIG} of --model"),
        Setting("model.weights", (name,), "safetensors of --model"),
    ]
    if "data.tokenizer" not in given_fields:
        if not (folder / TOKENIZER).is_file():
            raise ValueError(
                f"{folder}: no {TOKENIZER} in it; give --data.tokenizer FOLDER with the model's "
                f"tokenizer and chat template, or --data.tokenizer {BYTE_TOKENIZER}"
            )
        settings.append(Setting("data.tokenizer", name, f"{TOKENIZER} and template of --model"))
    return settings + _media_limits(folder, config)


def factory_of(config: Mapping[str, Any], folder: Path) -> str:
    """Return the import path of the factory for a folder's config.json. ValueError: no factory."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    if "run_dir" in config:
        raise ValueError(
            f"{folder}: is a run's folder, not a published model; dflop export {folder} --out NEW "
            f"writes one, or name the run's model and start from --model.weights {folder}"
        )
    known_types = ", ".join(FAMILIES)
    if any(config.get(name) for name in MEDIA_CONFIGS) or not isinstance(kind, str):
        raise ValueError(
            f"{folder}: model_type is {kind!r}; known: {known_types}; for another model write a "
            "factory with `weights` and give it by --model.factory MODULE:FUNCTION"
        )
    raise ValueError(
        f"{folder}: model_type {kind!r} is only a language model; known: {known_types}; to join "
        "it with an encoder give --model.factory models.llava:build --model.size TOWER+DECODER "
        "--model.weights vision=FOLDER,llm=FOLDER"
    )


def _token_limit(config: Mapping[str, Any]) -> Setting:
    """Return the limit of tokens per sample: the model's positions, at most `MAX_TOKENS`."""
    sections = (_mapping(config.get("text_config")), config)
    values = [section.get("max_position_embeddings") for section in sections]
    positions = next((n for n in values if _is_count(n)), 0) or 0
    if 0 < positions < MAX_TOKENS:
        return Setting("data.max_tokens", positions, f"max_position_embeddings of {CONFIG}")
    origin = f"of the model's {positions:,} positions" if positions else "default limit"
    return Setting("data.max_tokens", MAX_TOKENS, f"{origin}; longer samples are cut")


def _media_limits(folder: Path, config: Mapping[str, Any]) -> list[Setting]:
    """Return the limits of pictures and clips from the folder's processor files."""
    settings = []
    pictures, source = _processor(folder, PICTURE_PROCESSOR, "image_processor")
    sizes = _mapping(pictures.get("size"))
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = pictures.get(old) or sizes.get(new)
        if "merge_size" in pictures and _is_count(value):  # else these are sides, not areas
            settings.append(Setting(f"data.{old}", value, f"{new} of {source}"))
    if _is_count(value := pictures.get("max_patches")):
        settings.append(Setting("data.max_tiles", value, f"max_patches of {source}"))
    ratio = str(config.get("vision_aspect_ratio", ""))
    if (tiles := ratio.removeprefix(ANYRES_MAX)) != ratio and tiles.isdecimal() and int(tiles):
        settings.append(Setting("data.max_tiles", int(tiles), f"vision_aspect_ratio of {CONFIG}"))
    clips, source = _processor(folder, CLIP_PROCESSOR, "video_processor")
    if "merge_size" in clips:
        pixels = clips.get("max_pixels") or _mapping(clips.get("size")).get("longest_edge")
        frames = "num_frames" if clips.get("num_frames") else "max_frames"
        for name, key, value in (
            ("data.max_clip_pixels", "longest_edge", pixels),
            ("data.max_frames", frames, clips.get(frames)),
            ("data.frames_per_s", "fps", clips.get("fps")),
        ):
            if _is_count(value) or (key == "fps" and isinstance(value, float) and value > 0):
                settings.append(Setting(name, value, f"{key} of {source}"))
    return settings


def _processor(folder: Path, file: str, key: str) -> tuple[Mapping[str, Any], str]:
    """Return a processor's settings and their file: the file of all processors, which transformers
    writes since version 5 and reads first, or else the processor's own file."""
    if nested := _mapping(read_json(folder / ALL_PROCESSORS).get(key)):
        return nested, ALL_PROCESSORS
    if not (folder / file).is_file():
        file = PICTURE_PROCESSOR  # older folders use it for clips
    return read_json(folder / file), file


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def model_defaults(config: Mapping[str, Any], *, gpus: bool, lora: bool) -> list[Setting]:
    """Return defaults for training all published weights, or with `lora` adapters."""
    origin = f"for {'adapters on' if lora else 'all of'} published weights"
    return [
        Setting("model.dtype", "bfloat16", "on GPUs; the optimizer keeps float32")
        if gpus
        else Setting("model.dtype", "float32", "on CPUs"),
        _token_limit(config),
        Setting("train.learning_rate", LORA_RATE if lora else FULL_RATE, origin),
        Setting("train.epochs", 1.0, "every sample once"),
        Setting("train.warmup_ratio", WARMUP_RATIO, "of the steps"),
    ]


def run_dir_setting(model: str, data: str) -> Setting:
    """Return the setting of a run folder, named by model, data and time."""
    return Setting("run_dir", f"runs/{file_name(model, data, '{time}')}", "by model, data and time")


def file_name(model: str, data: str, *more: str) -> str:
    """Return a file or folder name from a model, data and other parts."""
    return "-".join([n for n in (_short_name(model), _short_name(data)) if n] + list(more))


def _short_name(path: str) -> str:
    """Return a model's or dataset's short name for use in a folder's name."""
    folder = Path(path).absolute() if path else Path()
    name = folder.stem if folder.is_file() else folder.name
    if folder.parent.name == SNAPSHOTS:
        name = folder.parent.parent.name.rpartition("--")[2]
    return NOT_IN_NAMES.sub("-", name)[:MAX_NAME_CHARS].strip("-.")
