"""Generate a clip for a caption with a trained model: Euler steps from noise, on one device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from dflop_jax.config import Config
from dflop_jax.contract import Array, MultimodalModel, Params, chip_of, on_chip
from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.datasets.clip_lists import SIDE_PX, block_side, latents_to_frames
from dflop_jax.data.datasets.clips import (
    GENERATOR,
    MAX_TIME,
    Grid,
    caption_ids,
    clip_format_of,
    clip_sample,
)
from dflop_jax.folders import make_folder
from dflop_jax.generate.programs import TOKEN_MULTIPLE
from dflop_jax.generate.row import AnswerRows, add_features, pack_row
from dflop_jax.train.load_params import load_params
from dflop_jax.train.run_context import build_model, build_trained_model

STRIP_FILE, GIF_FILE, LATENTS_FILE = "clip.png", "clip.gif", "latents.npy"
ENLARGEMENT = 8  # side in pixels of the square that shows one pixel of a frame
DEFAULT_FRAMES = 4  # of a built-in clip; also the frames per second of the moving picture


@dataclass(frozen=True)
class ClipAnswer:
    """A clip that a model generated for a caption."""

    prompt: str
    shape: tuple[int, ...]  # of the latents, [channels, time, rows, columns]
    files: tuple[str, ...]  # the latents, and pictures if the clip is a built-in one
    flow_steps: int  # Euler steps from noise to the clip
    took_s: float  # seconds of generation, compilation included
    step: int  # optimizer steps of the checkpoint
    checkpoint: str


def generates_clips(config: Config) -> bool:
    return GENERATOR in build_model(config.model).preprocessing


def make_clip(
    config: Config,
    run: str | Path,
    prompt: str,
    folder: str | Path,
    *,
    size: Grid | None = None,
    flow_steps: int = 30,
    seed: int = 0,
) -> ClipAnswer:
    """Generate a clip for a caption with a trained model and write it to a folder.

    Args:
      run: a run folder (its newest complete checkpoint) or a checkpoint in it.
      size: time, rows and columns of the latents; None: the size of the built-in data's clips.

    Raises:
      ValueError: the model does not generate clips, or the checkpoint or the caption is missing.
    """
    model = build_trained_model(config)
    form, tokenizer = clip_format_of(model), open_tokenizer(config.data.tokenizer, model.vocab_size)
    ids = caption_ids(prompt, tokenizer, config.data, "--prompt")
    is_built_in = not config.data.path
    if size is None and not is_built_in:
        raise ValueError("the clip needs a size; give --latents TIME,ROWS,COLUMNS")
    side = SIDE_PX // block_side(form.channels) if is_built_in else 0
    if flow_steps < 1:
        raise ValueError(f"--flow-steps {flow_steps}: must be at least 1")
    shape = form.channels, *(size or (DEFAULT_FRAMES, side, side))
    grid = form.grid(shape)
    device = jax.devices()[0]
    loaded = load_params(run, model, device)
    start = time.perf_counter()
    draws = form.tokens(len(ids), grid), form.channels * int(np.prod(form.patch))
    noise = np.random.default_rng(seed).standard_normal(draws, np.float32)[-int(np.prod(grid)) :]
    sample = clip_sample(form, ids, grid, np.zeros_like(noise), noise, 1.0)
    rows = pack_row([sample], model, TOKEN_MULTIPLE)
    levels = [form.noise_level(k / flow_steps) for k in range(flow_steps, -1, -1)]
    integrate = jax.jit(partial(integrate_flow, model, chip_of(device)))
    patches_by_token = integrate(loaded.params, rows, np.array(levels, np.float32))
    patches = np.asarray(patches_by_token)[rows.fields["role"][0] == form.clip]
    files = write_clip(Path(folder), form.latents(patches, grid), is_built_in)
    return ClipAnswer(
        prompt=prompt,
        shape=shape,
        files=tuple(map(str, files)),
        flow_steps=flow_steps,
        took_s=time.perf_counter() - start,
        step=loaded.step,
        checkpoint=str(loaded.folder),
    )


def integrate_flow(
    model: MultimodalModel, chip: str, params: dict[str, Params], rows: AnswerRows, times: Array
) -> Array:
    """Return patches, float32 [tokens, values], after an Euler step between each two `times`."""
    generator, generator_params = on_chip(model.modules[GENERATOR], chip), params[GENERATOR]
    fields = add_features(model, chip, params, rows)

    def advance(x: Array, span: Array) -> tuple[Array, None]:
        time_now, time_next = span
        moment = jnp.full(x.shape[:1], MAX_TIME * time_now, jnp.float32)
        batch = {**fields, "latents": x[None], "time": moment[None]}
        h = generator.entry(generator_params["entry"], batch)
        h, _ = jax.lax.scan(
            lambda h, p: (generator.layer(p, h, batch), None), h, generator_params["layers"]
        )
        velocity = generator.velocity(generator_params["exit"], h, batch)[0]  # type: ignore[attr-defined]
        return x + (time_next - time_now) * velocity, None

    spans = jnp.stack([times[:-1], times[1:]], axis=1)
    return jax.lax.scan(advance, fields["latents"][0], spans)[0]


def write_clip(folder: Path, latents: np.ndarray, is_built_in: bool) -> list[Path]:
    """Write latents; for a built-in clip, also a strip of its frames and a moving picture."""
    make_folder(folder, "choose another --out")
    files = [folder / LATENTS_FILE]
    np.save(files[0], latents)
    if is_built_in:
        frames = latents_to_frames(latents, block_side(latents.shape[0]))
        large = frames.repeat(ENLARGEMENT, axis=1).repeat(ENLARGEMENT, axis=2)
        Image.fromarray(np.concatenate(large, axis=1)).save(folder / STRIP_FILE)
        first, *rest = (Image.fromarray(frame) for frame in large)
        frame_ms = 1000 // DEFAULT_FRAMES
        first.save(folder / GIF_FILE, save_all=True, append_images=rest, duration=frame_ms, loop=0)
        files += [folder / STRIP_FILE, folder / GIF_FILE]
    return files
