"""Clips of a trained model: from noise to a caption's clip in Euler steps, on one device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from dflop_jax.config import Config
from dflop_jax.contract import Array, MultimodalModel, Params, chip_of, on_chip
from dflop_jax.data.build import any_tokenizer
from dflop_jax.data.datasets.clip_samples import (
    GENERATOR,
    TIMES,
    ClipForm,
    Grid,
    caption_ids,
    form_of,
)
from dflop_jax.data.datasets.moving_scenes import SIDE, block_of, frames_of
from dflop_jax.data.media.limits import Limits
from dflop_jax.folders import made
from dflop_jax.generate.programs import TOKEN_MULTIPLE
from dflop_jax.generate.row import LLM, encode
from dflop_jax.train.load_params import load_params
from dflop_jax.train.prepare import build_model, trained_model

STRIP, MOVING, LATENTS = "clip.png", "clip.gif", "latents.npy"
ENLARGEMENT = 8  # pixels of a side of the picture for one of a frame
FRAME_MS = 250  # for which a frame is shown
DEFAULT_FRAMES = 4  # of an embedded clip, unless said


@dataclass(frozen=True)
class ClipAnswer:
    """What a model made of a caption.

    Attributes:
      shape: of the latents, [channels, time, rows, columns].
      files: what was written: the latents, and pictures where their pixels are known.
      flow_steps: Euler steps from noise to the clip.
      took_s: seconds that they took, compilation included.
      step: optimizer steps of the checkpoint.
    """

    prompt: str
    shape: tuple[int, ...]
    files: tuple[str, ...]
    flow_steps: int
    took_s: float
    step: int
    checkpoint: str


def generates_clips(config: Config) -> bool:
    """Whether the model of a configuration answers by clips."""
    return GENERATOR in build_model(config.model).preprocessing


class ClipGenerator:
    """A trained model, ready to make clips.

    Args:
      config: what it was trained with.
      run: a run folder (its newest whole checkpoint) or a checkpoint in it.

    Raises:
      ValueError: the model makes no clips, or there is no such checkpoint.
    """

    def __init__(self, config: Config, run: str | Path, device: jax.Device | None = None):
        self._config = config
        model = trained_model(config)
        self._form = form_of(model)
        self._tokenizer = any_tokenizer(config.data.tokenizer, model.vocab_size)
        device = device or jax.devices()[0]
        self._loaded = load_params(run, model, device)
        self._flow = jax.jit(partial(flow, model, chip_of(device)))

    def make(
        self,
        prompt: str,
        out: str | Path,
        *,
        size: Grid | None = None,
        flow_steps: int = 30,
        seed: int = 0,
    ) -> ClipAnswer:
        """Make a clip of a caption and write it to the folder `out`.

        Args:
          size: time, rows and columns of its latents; None: those of an embedded clip.

        Raises:
          ValueError: an empty caption, or a size that the model cannot take.
        """
        limits = Limits.of(self._config.data)
        ids = caption_ids(prompt, self._tokenizer, limits, "--prompt")
        embedded = not self._config.data.path
        if size is None:
            if not embedded:
                raise ValueError("say how large the clip is: --latents TIME,ROWS,COLUMNS")
            side = SIDE // block_of(self._form.channels)
            size = DEFAULT_FRAMES, side, side
        if flow_steps < 1:
            raise ValueError(f"--flow-steps {flow_steps}: at least 1")
        shape = (self._form.channels, *size)
        grid = self._form.grid(shape)
        begun = time.perf_counter()
        words, fields, heard = prompt_fields(self._form, ids, grid)
        noise = np.random.default_rng(seed).standard_normal(
            (len(fields["role"][0]), self._form.channels * int(np.prod(self._form.patch))),
            np.float32,
        )
        times = np.array([self._form.at(k / flow_steps) for k in range(flow_steps, -1, -1)])
        said = self._flow(self._loaded.params, words, fields, heard, noise, np.float32(times))
        patches = np.asarray(said)[fields["role"][0] == self._form.clip]
        latents = self._form.latents(patches, grid)
        files = write_clip(Path(out), latents, embedded)
        return ClipAnswer(
            prompt=prompt,
            shape=shape,
            files=tuple(map(str, files)),
            flow_steps=flow_steps,
            took_s=time.perf_counter() - begun,
            step=self._loaded.step,
            checkpoint=str(self._loaded.folder),
        )


def prompt_fields(
    form: ClipForm, ids: np.ndarray, grid: Grid
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """A caption and its clip as one row of each module, padded.

    Returns:
      fields of the LLM and of the generator, without its values, [1, tokens, ...]; and the
      caption's token that stands at each of the generator's, int32 [tokens], -1 for none.
    """
    n_text = len(ids)
    words = {
        "tokens": ids,
        "segment_ids": np.ones(n_text, np.int32),
        "positions": np.arange(n_text, dtype=np.int32),
    }
    fields = form.fields(n_text, grid)
    tokens = form.tokens(n_text, grid)
    fields["segment_ids"] = np.ones(tokens, np.int32)
    heard = np.full(tokens, -1, np.int32)
    heard[form.time_tokens : form.time_tokens + n_text] = np.arange(n_text)
    missing = -tokens % TOKEN_MULTIPLE
    return (
        {name: _row(a, -n_text % TOKEN_MULTIPLE) for name, a in words.items()},
        {name: _row(a, missing) for name, a in fields.items()},
        np.pad(heard, (0, missing), constant_values=-1),
    )


def _row(values: np.ndarray, missing: int) -> np.ndarray:
    """[1, tokens, ...], zeros at the `missing` last."""
    return np.pad(values, ((0, missing), *((0, 0),) * (values.ndim - 1)))[None]


def flow(
    model: MultimodalModel,
    chip: str,
    params: dict[str, Params],
    words: dict[str, Array],
    fields: dict[str, Array],
    heard: Array,
    noise: Array,
    times: Array,
) -> Array:
    """Patches float32 [tokens, values] after Euler steps from one of `times` to the next."""
    llm, generator = (on_chip(model.modules[name], chip) for name in (LLM, GENERATOR))
    states = encode(llm, params[LLM], words)[""][0]
    spec: Any = generator.field_spec("text", 1, 1)
    text = jnp.where((heard >= 0)[:, None], states[jnp.maximum(heard, 0)], 0.0).astype(spec.dtype)
    generator_params = params[GENERATOR]

    def advance(x: Array, span: Array) -> tuple[Array, None]:
        now, after = span
        moment = jnp.full(heard.shape, TIMES * now, jnp.float32)
        batch = {**fields, "text": text[None], "latents": x[None], "time": moment[None]}
        h = generator.entry(generator_params["entry"], batch)
        h, _ = jax.lax.scan(
            lambda h, p: (generator.layer(p, h, batch), None), h, generator_params["layers"]
        )
        said = generator.velocity(generator_params["exit"], h, batch)[0]  # type: ignore[attr-defined]
        return x + (after - now) * said, None

    return jax.lax.scan(advance, noise, jnp.stack([times[:-1], times[1:]], axis=1))[0]


def write_clip(folder: Path, latents: np.ndarray, embedded: bool) -> list[Path]:
    """Write latents and, of an embedded clip, a strip of its frames and a moving picture."""
    made(folder, "choose another --out")
    files = [folder / LATENTS]
    np.save(files[0], latents)
    if embedded:
        frames = frames_of(latents, block_of(latents.shape[0]))
        large = frames.repeat(ENLARGEMENT, axis=1).repeat(ENLARGEMENT, axis=2)
        Image.fromarray(np.concatenate(large, axis=1)).save(folder / STRIP)
        first, *rest = (Image.fromarray(frame) for frame in large)
        first.save(folder / MOVING, save_all=True, append_images=rest, duration=FRAME_MS, loop=0)
        files += [folder / STRIP, folder / MOVING]
    return files
