"""Which factory builds the model of a published folder, by its model_type. A new family joins by
one line here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
CONFIGS_OF_MEDIA = ("vision_config", "audio_config")


def factory_of(config: Mapping[str, Any], folder: Path) -> str:
    """The import path of the factory for a folder's config.json.

    Raises:
      ValueError: an unknown model_type; the message lists the known ones.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    if "run_dir" in config:
        raise ValueError(
            f"{folder}: is a run's folder, no published model; dflop export {folder} --out NEW "
            f"writes one, or name the run's model and begin with --model.weights {folder}"
        )
    known = ", ".join(FAMILIES)
    if any(config.get(name) for name in CONFIGS_OF_MEDIA) or not isinstance(kind, str):
        raise ValueError(
            f"{folder}: model_type is {kind!r}; known: {known}; for another model write a factory "
            "with `weights` and give it by --model.factory MODULE:FUNCTION"
        )
    raise ValueError(
        f"{folder}: model_type {kind!r} is a language model alone; known: {known}; to join it with "
        "an encoder give --model.factory models.llava:build --model.size TOWER+DECODER "
        "--model.weights vision=FOLDER,llm=FOLDER"
    )
