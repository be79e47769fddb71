"""What a published model's folder says of a run: factory, size, weights, tokenizer and limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dflop_jax.data.text.pieces import BYTES
from dflop_jax.data.text.tokenizer_files import read_json
from dflop_jax.front.families import factory_of
from dflop_jax.front.setting import Setting
from dflop_jax.weights import read_config

TOKENIZER, CONFIG = "tokenizer.json", "config.json"
PICTURES, CLIPS, ALL = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
ANYRES_MAX = "anyres_max_"  # of vision_aspect_ratio: so many tiles
# Samples beyond so many tokens are cut unless the user says more: one of the data's longest would
# else decide how much memory a plan needs. Twice as many take up to four times the attention.
MOST_TOKENS = 8192


def folder_settings(folder: Path, given: Collection[str] = ()) -> list[Setting]:
    """The settings of a folder that `transformers` wrote.

    Args:
      given: fields that the user gives, of which the folder need say nothing.

    Raises:
      ValueError: no such folder, no config.json, a model that is not known, no tokenizer.
    """
    config = read_config(folder)
    name = str(folder)
    settings = []
    if "model.factory" not in given:
        factory = factory_of(config, folder)
        settings.append(Setting("model.factory", factory, f"model_type of {CONFIG}"))
    settings += [
        Setting("model.size", name, f"{CONFIG} of --model"),
        Setting("model.weights", (name,), "safetensors of --model"),
    ]
    if "data.tokenizer" not in given:
        if not (folder / TOKENIZER).is_file():
            raise ValueError(
                f"{folder}: no {TOKENIZER} in it; give --data.tokenizer FOLDER with the model's "
                f"tokenizer and chat template, or --data.tokenizer {BYTES}"
            )
        settings.append(Setting("data.tokenizer", name, f"{TOKENIZER} and template of --model"))
    return settings + _limits(folder, config)


def longest_text(config: Mapping[str, Any]) -> int:
    """Positions that the text of a model may have; 0 where its configuration does not say."""
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        value = part.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    return 0


def token_limit(config: Mapping[str, Any]) -> Setting:
    """How long samples may be: what the model has positions for, within a bound of ours."""
    positions = longest_text(config)
    if 0 < positions < MOST_TOKENS:
        return Setting("data.max_tokens", positions, f"max_position_embeddings of {CONFIG}")
    why = f"of the model's {positions:,} positions" if positions else "our bound"
    return Setting("data.max_tokens", MOST_TOKENS, f"{why}; longer samples are cut")


def _limits(folder: Path, config: Mapping[str, Any]) -> list[Setting]:
    """Limits of pictures and clips, of those files that say any."""
    settings = []
    pictures, source = _processor(folder, PICTURES, "image_processor")
    sizes = _mapping(pictures.get("size"))
    for name, keys in {
        "data.min_pixels": ("min_pixels", "shortest_edge"),
        "data.max_pixels": ("max_pixels", "longest_edge"),
    }.items():
        old, new = keys
        value = pictures.get(old) or sizes.get(new)
        if "merge_size" in pictures and _is_count(value):  # else these are sides, not areas
            settings.append(Setting(name, value, f"{new} of {source}"))
    if _is_count(value := pictures.get("max_patches")):
        settings.append(Setting("data.max_tiles", value, f"max_patches of {source}"))
    ratio = str(config.get("vision_aspect_ratio", ""))
    if (tiles := ratio.removeprefix(ANYRES_MAX)) != ratio and tiles.isdecimal() and int(tiles):
        settings.append(Setting("data.max_tiles", int(tiles), f"vision_aspect_ratio of {CONFIG}"))
    clips, source = _processor(folder, CLIPS, "video_processor")
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
    """A processor's settings and the file that has them: that of all processors, which transformers
    writes since version 5 and reads first, or else its own."""
    if nested := _mapping(read_json(folder / ALL).get(key)):
        return nested, ALL
    alone = file if (folder / file).is_file() else PICTURES  # which older folders have for clips
    return read_json(folder / alone), alone


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
