"""Reads processor files of a published folder: colour normalisation, and facts for the preparation
of data.

A value that is not supported here is refused by name, so that data is prepared exactly as by the
published processor. Absent settings have the defaults of the published class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Colours = tuple[float, float, float]  # of red, green and blue
Settings = Mapping[str, Any]

# Files with processor settings, in the published order; a newer folder has them all in
# COMBINED_FILE.
COMBINED_FILE = "processor_config.json"
PROCESSOR_FILES: Mapping[str, tuple[str, ...]] = {
    "image_processor": ("preprocessor_config.json",),
    "video_processor": ("video_preprocessor_config.json", "preprocessor_config.json"),
    "feature_extractor": ("preprocessor_config.json",),
}


@dataclass(frozen=True)
class Processing:
    """A tower's input is colours (0 to 255) times `scale` plus `shift`; `facts` are further entries
    of `MultimodalModel.preprocessing`."""

    scale: Colours
    shift: Colours
    facts: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_mean_std(
        cls, mean: Sequence[float], std: Sequence[float], factor: float = 1 / 255
    ) -> Processing:
        """Return the processing (factor x colour - mean) / std."""
        scale = [factor / s for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        return cls((scale[0], scale[1], scale[2]), (shift[0], shift[1], shift[2]))

    def normalize(self, colours: jax.Array, *, innermost: bool) -> jax.Array:
        """Return uint8 [..., n] as float32. With `innermost` the n values cycle through the
        colours; otherwise all values of one colour come before those of the next."""
        spread: Callable[..., np.ndarray] = np.tile if innermost else np.repeat
        scale, shift = (
            spread(np.array(c, np.float32), colours.shape[-1] // 3).reshape(
                (1,) * (colours.ndim - 1) + (-1,)
            )
            for c in (self.scale, self.shift)
        )
        return colours.astype(jnp.float32) * scale + shift


SYMMETRIC = Processing.from_mean_std((0.5,) * 3, (0.5,) * 3)  # -1 to 1
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours
IMAGENET_COLOURS = Processing.from_mean_std(IMAGENET_MEAN, IMAGENET_STD)

_RESCALE = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_IDENTITY = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
_RESIZE = {"do_resize": True, "resample": 3, **_RESCALE}
_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
_QWEN_CLIPS = {
    **_RESIZE, **_HALVES, **_PATCHES, "do_sample_frames": True, "max_duration": None, "fps": 2,
    "size": {"shortest_edge": 131072, "longest_edge": 786432}, "min_frames": 4, "max_frames": 768,
    "num_frames": None, "cap_pixels_per_frame": None, "max_video_tokens": 768,
}  # fmt: skip
_TILED_CLIPS = {
    **_RESIZE, **_CLIP, "size": {"height": 384, "width": 384}, "do_center_crop": None,
    "do_sample_frames": False,
}  # fmt: skip
# Default settings of pictures and clips in the published classes, by model_type.
IMAGE_DEFAULTS: Mapping[str, Settings] = {
    "qwen3_vl": {**_RESIZE, **_CLIP, **_PATCHES, "patch_size": 14},
    "llava_onevision": {**_RESIZE, **_CLIP, "do_pad": True, "image_grid_pinpoints": None,
                        "size": {"height": 384, "width": 384}},
    "internvl": {**_RESIZE, **_CLIP, "min_patches": 1, "size": {"height": 384, "width": 384}},
    "gemma3": {**_RESIZE, **_HALVES, "resample": 2, "size": {"height": 224, "width": 224}},
    "gemma4": {**_RESIZE, **_IDENTITY, "do_normalize": False, "patch_size": 16,
               "pooling_kernel_size": 3, "max_soft_tokens": 280},
}  # fmt: skip
VIDEO_DEFAULTS: Mapping[str, Settings] = {
    "qwen3_vl": _QWEN_CLIPS,
    "llava_onevision": _TILED_CLIPS,
    "internvl": {**_TILED_CLIPS, "initial_shift": True},
    "gemma4": {**_RESIZE, **_IDENTITY, "do_sample_frames": True, "num_frames": 32, "patch_size": 16,
               "pooling_kernel_size": 3, "max_soft_tokens": 70},
}  # fmt: skip
AUDIO_DEFAULTS: Settings = {
    "feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400,
    "chunk_length": 30, "padding_value": 0.0, "dither": 0.0,
}  # fmt: skip
_SAME_PROCESSORS = {"qwen3_5": "qwen3_vl"}  # families with the processors of another
# Settings of clips at native resolution that are facts of the form "native" under equal names.
_CLIP_FACTS = ("min_frames", "num_frames", "cap_pixels_per_frame", "max_video_tokens")


def read_media_processing(folder: Path, kind: str, size: Any) -> Processing | None:
    """Return how a folder's processors prepare pictures and clips of a tower; None if it has no
    such file.

    Args:
      kind: model_type of the folder.
      size: of the tower, which the files must match.

    Raises:
      ValueError: a file is not JSON, or has an unsupported value.
    """
    kind = _SAME_PROCESSORS.get(kind, kind)
    pictures, file = _read_settings(folder, "image_processor", IMAGE_DEFAULTS.get(kind))
    clips, clip_file = _read_settings(folder, "video_processor", VIDEO_DEFAULTS.get(kind))
    if pictures is None:
        return None
    fixed = {**IMAGE_DEFAULTS[kind], **_settings_of_size(kind, size)}
    honoured = {*_RESCALE, "image_mean", "image_std", "image_grid_pinpoints", "max_soft_tokens"}
    if kind == "qwen3_vl":
        honoured.add("size")
    _check_fixed(pictures, fixed, honoured, file)
    processing = _colour_scale(pictures, file, twice=kind == "gemma4")
    facts: dict[str, Any] = {}
    if kind == "llava_onevision":
        grids = pictures["image_grid_pinpoints"]
        facts = {"pinpoints": tuple(map(tuple, grids))} if grids else {}
        facts["mean"] = tuple(pictures["image_mean"])
    elif kind == "gemma4":
        facts["soft_tokens"] = pictures["max_soft_tokens"]
    if clips is not None and clip_file != file:
        fixed = {**VIDEO_DEFAULTS[kind], **_settings_of_size(kind, size)}
        extra = (
            {"size", "fps", "max_frames", *_CLIP_FACTS} if kind == "qwen3_vl" else {"num_frames"}
        )
        extra |= {*_RESCALE, "image_mean", "image_std", "max_soft_tokens"}
        _check_fixed(clips, fixed, extra, clip_file)
        clip_colours = _colour_scale(clips, clip_file, twice=kind == "gemma4")
        if clip_colours != processing:
            raise ValueError(
                f"{clip_file}: image_mean, image_std or rescale_factor differ from those of "
                f"{file.name}; one tower reads both; make them equal in both files"
            )
    if clips is not None and kind == "qwen3_vl":
        facts |= {name: clips[name] for name in _CLIP_FACTS if clips[name] is not None}
        facts["min_clip_pixels"] = clips["size"]["shortest_edge"]
    if clips is not None and kind == "gemma4":
        facts["frame_tokens"] = clips["max_soft_tokens"]
    return Processing(processing.scale, processing.shift, tuple(sorted(facts.items())))


def read_audio_facts(folder: Path, mel_bins: int, frames: int) -> dict[str, Any]:
    """Return a folder's feature extractor as facts of `mel`; {} if it has no such file.

    Raises:
      ValueError: a file is not JSON, has an unsupported value, or has one that does not fit the
        encoder's bins and frames.
    """
    sounds, file = _read_settings(folder, "feature_extractor", AUDIO_DEFAULTS)
    if sounds is None:
        return {}
    fixed_by_size = {"feature_size": mel_bins}
    _check_fixed(
        sounds,
        {**AUDIO_DEFAULTS, **fixed_by_size},
        {"sampling_rate", "hop_length", "n_fft", "chunk_length"},
        file,
    )
    given_frames = sounds["chunk_length"] * sounds["sampling_rate"] // sounds["hop_length"]
    if given_frames != frames:
        raise ValueError(
            f"{file}: chunk_length, sampling_rate and hop_length give {given_frames} frames, the "
            f"encoder takes {frames}; use both files of one model"
        )
    return {
        "sample_rate": sounds["sampling_rate"],
        "hop": sounds["hop_length"],
        "n_fft": sounds["n_fft"],
        "window_s": float(sounds["chunk_length"]),
    }


def _settings_of_size(kind: str, size: Any) -> dict[str, Any]:
    """Return the settings that follow from a tower's size."""
    if kind == "qwen3_vl":
        sides = {"patch_size": size.patch_px, "merge_size": size.merge}
        return {**sides, "temporal_patch_size": size.frames}
    if kind == "gemma4":
        return {"patch_size": size.patch_px, "pooling_kernel_size": size.merge}
    return {"size": {"height": size.tile_px, "width": size.tile_px}}


def _read_settings(
    folder: Path, part: str, defaults: Settings | None
) -> tuple[Settings | None, Path]:
    """Return a part's settings with defaults filled in, and the file that has them; None if there
    is no such file, or the family has no such part."""
    for name, key in ((COMBINED_FILE, part), *((name, "") for name in PROCESSOR_FILES[part])):
        file = folder / name
        if defaults is None or not file.is_file():
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError as e:
            raise ValueError(f"{file}: not JSON ({e}); download it again") from None
        values = values.get(key) if key and isinstance(values, dict) else values
        if isinstance(values, dict):
            return {**defaults, **{k: v for k, v in values.items() if v is not None}}, file
    return None, folder


def _check_fixed(settings: Settings, fixed: Settings, honoured: set[str], file: Path) -> None:
    """Raise ValueError if a setting outside `honoured` differs from its fixed value."""
    for name, value in fixed.items():
        found = settings.get(name, value)
        if name not in honoured and _square_side(found) != _square_side(value):
            raise ValueError(
                f"{file}: {name} {found} is not supported, only {value}; edit the file, "
                "or use another model"
            )


def _square_side(value: Any) -> Any:
    """Return a setting, as one number if it has two equal sides."""
    sides = set(value.values()) if isinstance(value, dict) else {None}
    return sides.pop() if len(sides) == 1 and isinstance(value, dict) else value


def _colour_scale(settings: Settings, file: Path, *, twice: bool) -> Processing:
    """Return the colour normalisation; `twice`: the tower itself maps 0 to 1 to -1 to 1."""
    factor = settings["rescale_factor"] if settings["do_rescale"] else 1.0
    mean, std = (
        [float(v) for v in np.broadcast_to(np.array(settings[name], float), 3)]
        if settings["do_normalize"] else [usual] * 3
        for name, usual in (("image_mean", 0.0), ("image_std", 1.0))
    )  # fmt: skip
    if min(map(abs, std)) == 0:
        raise ValueError(f"{file}: image_std {std} must not be 0")
    if twice:  # 2 (x - 0.5) of the processor's output x
        mean, std = [m + s / 2 for m, s in zip(mean, std)], [s / 2 for s in std]
    return Processing.from_mean_std(mean, std, factor)
