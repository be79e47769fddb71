"""Logits and gradients of transformers; the only module that needs torch."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from dflop_jax.data.media.anyres import GRID
from dflop_jax.verify.samples import MAX_TILES, MixedSample, RandomMedium

# (mean, standard deviation) by which the published processors normalize pixels.
SYMMETRIC = (0.5, 0.5)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
POSITIONS = "audio_tower.embed_positions.weight"  # fixed sinusoids


@dataclass(frozen=True)
class ReferenceFamily:
    """How a family of models in transformers gets its inputs."""

    arguments: Callable[[Sequence[RandomMedium]], dict[str, Any]]
    has_clip_token: bool = True  # id 1 stands for a clip, 0 for other media; else 0 for all
    # writes facts of the samples into the configuration of transformers
    prepare: Callable[[Any], None] = lambda config: None
    # Suffix of a tensor that is never trained; transformers does not freeze it in a loaded model.
    fixed: str = ""
    # name of the argument with the kind of medium of every token, and the number of each kind
    types: tuple[str, Mapping[str, int]] | None = None
    # names of functions in transformers' code -> more exact replacements there
    replacements: Mapping[str, str] = field(default_factory=dict)


def missing_packages() -> str:
    """Return which package is missing and how to install it; "" if none is."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; run pip install 'dflop_jax[reference]'"
    return ""


def _import_package(name: str) -> Any:
    """Import a package without the warnings of its import."""
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(name)


@dataclass(frozen=True)
class Reference:
    """Results of transformers on the samples."""

    logits: list[np.ndarray]  # [tokens, vocab] of each sample
    gradients: Mapping[str, np.ndarray]  # of the sum of all losses, by tensor name


def run_reference(
    folder: Path, kind: str, name: str, samples: Sequence[MixedSample], *, double: bool = False
) -> Reference:
    """Run the folder's weights in transformers' class `name`, in float32 or, with `double`, all in
    float64. ValueError if transformers cannot load the folder."""
    model = _load_model(folder, name)
    if double:
        model.double()
    config, family = model.config, FAMILIES[kind]
    config.image_token_id = config.audio_token_id = 0
    config.video_token_id = int(family.has_clip_token)
    family.prepare(config)
    for name, parameter in model.named_parameters():
        if family.fixed and name.endswith(family.fixed):
            parameter.requires_grad_(False)
    code = sys.modules[type(model).__module__]
    exact = {name: getattr(code, replacement) for name, replacement in family.replacements.items()}
    precision = _use_float64(model) if double else nullcontext()
    with patch.multiple(code, **exact) if exact else nullcontext(), precision:
        logits = [_run_sample(model, family, mixed) for mixed in samples]
    return Reference(logits, _named_gradients(model))


def _run_sample(model: Any, family: ReferenceFamily, mixed: MixedSample) -> np.ndarray:
    """Return the logits of a sample, and add its loss's gradients to the model's."""
    torch = _import_package("torch")
    llm = mixed.sample.fields["llm"]
    ids = llm["tokens"].astype(np.int64)
    ids[np.array(mixed.kinds) == "video"] = int(family.has_clip_token)
    inputs = {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)}
    inputs |= family.arguments(mixed.media)
    if family.types:
        name, numbers = family.types
        inputs[name] = np.array([[numbers.get(kind, 0) for kind in mixed.kinds]])
    dtype = next(model.parameters()).dtype
    tensors = {k: torch.from_numpy(np.asarray(a)) for k, a in inputs.items()}
    tensors = {k: a.to(dtype) if a.is_floating_point() else a for k, a in tensors.items()}
    output = model(**tensors).logits[0]
    targets = torch.from_numpy(llm["targets"].astype(np.int64))
    losses = torch.nn.functional.cross_entropy(output, targets, reduction="none")
    (losses * torch.from_numpy(llm["weights"]).to(dtype)).sum().backward()
    logits: np.ndarray = output.detach().numpy()
    return logits


class _DoubleTorch:
    """A stand-in for the torch package in which float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        name = "float64" if name in ("float32", "float") else name
        return getattr(_import_package("torch"), name)


@contextmanager
def _use_float64(model: Any) -> Iterator[None]:
    """While active, code of a model's classes that asks for float32 gets float64."""
    tensor = _import_package("torch").Tensor
    names = {c.__module__ for part in model.modules() for c in type(part).__mro__}
    codes = [sys.modules[n] for n in names if n.startswith("transformers.")]
    with ExitStack() as stack:
        stack.enter_context(patch.object(tensor, "float", tensor.double))
        for code in codes:
            if hasattr(code, "torch"):
                stack.enter_context(patch.object(code, "torch", _DoubleTorch()))
        yield


def _named_gradients(model: Any) -> dict[str, np.ndarray]:
    """Return the accumulated gradients of a torch model by tensor name; zeros if it has none."""
    saved = model.state_dict().keys()
    buffers = ((n, a) for n, a in model.named_buffers() if n in saved)
    return {
        n: np.zeros(tuple(p.shape), np.float32) if p.grad is None else p.grad.numpy()
        for n, p in (*model.named_parameters(), *buffers)
    }


def _load_model(folder: Path, name: str) -> Any:
    torch, transformers = _import_package("torch"), _import_package("transformers")
    log = transformers.utils.logging
    level = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            return getattr(transformers, name).from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            )
    except (OSError, ValueError, RuntimeError, KeyError) as e:
        raise ValueError(
            f"{folder}: transformers cannot load it ({e}); download it again"
        ) from None
    finally:
        log.set_verbosity(level)
        log.enable_progress_bar()


# ---- the media inputs of each family ----


def _normalize(pixels: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    """Normalize uint8 [n, height, width, 3] to float32 [n, 3, height, width]."""
    scaled = (pixels.astype(np.float64) / 255 - mean) / std
    return scaled.astype(np.float32).transpose(0, 3, 1, 2)


def _llava_onevision(media: Sequence[RandomMedium]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    tiles = [_normalize(drawn.medium.fields["pixels"], *SYMMETRIC) for drawn in media]
    if sizes := [drawn.size[::-1] for drawn in media if drawn.kind == "image"]:
        pictures = [t for t, drawn in zip(tiles, media) if drawn.kind == "image"]
        max_tiles = max(map(len, pictures))
        padded = [np.pad(t, ((0, max_tiles - len(t)), *[(0, 0)] * 3)) for t in pictures]
        inputs["pixel_values"], inputs["image_sizes"] = np.stack(padded), np.array(sizes)
        inputs["batch_num_images"] = np.array([len(pictures)])
    if clips := [t for t, drawn in zip(tiles, media) if drawn.kind == "video"]:
        inputs["pixel_values_videos"] = np.stack(clips)
    return inputs


def _set_llava_grids(config: Any) -> None:
    """Set LLaVA-OneVision's grids and its maximum tiles of a picture."""
    px = config.vision_config.image_size
    config.image_grid_pinpoints = [[px * rows, px * columns] for rows in GRID for columns in GRID]
    config.vision_aspect_ratio = f"anyres_max_{MAX_TILES}"


def _tiles(colours: tuple[Any, Any], media: Sequence[RandomMedium]) -> dict[str, Any]:
    tiles = [drawn.medium.fields["pixels"] for drawn in media]
    return {"pixel_values": _normalize(np.concatenate(tiles), *colours)} if tiles else {}


def _qwen2_audio(media: Sequence[RandomMedium]) -> dict[str, Any]:
    if not media:
        return {}
    mel, frames = (
        np.concatenate([drawn.medium.fields[name] for drawn in media])
        for name in ("mel", "mel_frames")
    )
    used = frames[:, None] > np.arange(mel.shape[-1])
    return {"input_features": mel, "feature_attention_mask": used.astype(np.int64)}


def _qwen3_vl(media: Sequence[RandomMedium]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for kind, argument in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        natives = [m.medium for m in media if m.kind == kind]
        if not natives:
            continue
        patches = np.concatenate([m.fields["patches"] for m in natives])
        inputs[argument] = ((patches.astype(np.float64) / 255 - 0.5) / 0.5).astype(np.float32)
        inputs[f"{kind}_grid_thw"] = np.array([(len(m.grids), *m.grids[0]) for m in natives])
    return inputs


def _gemma4(media: Sequence[RandomMedium]) -> dict[str, Any]:
    """Return patches padded to the longest picture; our patches are ordered by colour first."""
    inputs: dict[str, Any] = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        pieces = []
        for medium in (m.medium for m in media if m.kind == kind):
            ends = np.cumsum(medium.lengths)[:-1]
            fields = (np.split(medium.fields[f], ends) for f in ("patches", "grid"))
            pieces += list(zip(*fields, strict=True))
        if not pieces:
            continue
        longest = max(len(patches) for patches, _ in pieces)
        padding = [((0, longest - len(patches)), (0, 0)) for patches, _ in pieces]
        px = isqrt(pieces[0][0].shape[1] // 3)
        flat = [p.reshape(-1, 3, px * px).swapaxes(1, 2).reshape(len(p), -1) for p, _ in pieces]
        values = [np.pad(p.astype(np.float32) / 255, m) for p, m in zip(flat, padding, strict=True)]
        positions = [
            np.pad(g[:, 1::-1], m, constant_values=-1)
            for (_, g), m in zip(pieces, padding, strict=True)
        ]
        inputs[name] = np.stack(values)
        inputs[f"{kind}_position_ids"] = np.stack(positions).astype(np.int64)
    clips = [len(m.medium.lengths) for m in media if m.kind == "video"]
    return inputs | ({"num_frames_per_video": np.array(clips)} if clips else {})


MEDIA_NUMBERS = {"image": 1, "video": 2}  # numbers of kinds of media
TOKEN_TYPES = "mm_token_type_ids", MEDIA_NUMBERS
# The chunked form subtracts large sums of decays, which loses digits.
EXACT_DELTA_RULE = {"torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule"}
FAMILIES = {
    "llava_onevision": ReferenceFamily(_llava_onevision, prepare=_set_llava_grids),
    "internvl": ReferenceFamily(partial(_tiles, IMAGENET), has_clip_token=False),
    "qwen2_audio": ReferenceFamily(_qwen2_audio, fixed=POSITIONS),
    "qwen3_vl": ReferenceFamily(_qwen3_vl, types=TOKEN_TYPES),
    "qwen3_5": ReferenceFamily(_qwen3_vl, types=TOKEN_TYPES, replacements=EXACT_DELTA_RULE),
    "qwen3_5_text": ReferenceFamily(lambda media: {}, replacements=EXACT_DELTA_RULE),
    "gemma3": ReferenceFamily(
        partial(_tiles, SYMMETRIC),
        has_clip_token=False,
        types=("token_type_ids", dict.fromkeys(MEDIA_NUMBERS, 1)),
    ),
    "gemma3_text": ReferenceFamily(lambda media: {}),
    "gemma4": ReferenceFamily(_gemma4, types=TOKEN_TYPES),
    "gemma4_text": ReferenceFamily(lambda media: {}),
}
