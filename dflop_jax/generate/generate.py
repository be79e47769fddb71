"""Answers of a trained model, to look at what it has learned: one prompt, one device.

Two programs run an answer: one encodes the media and prefills the prompt, one adds a token. Their
shapes are padded, so that other prompts of about this length compile nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dflop_jax.config import Config
from dflop_jax.contract import (
    Array,
    GeneratingModule,
    MultimodalModel,
    Params,
    chip_of,
    on_chip,
)
from dflop_jax.data import MediaSpec, Tokenizer
from dflop_jax.data.build import any_tokenizer
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.generate import decoding
from dflop_jax.generate.decoding import decode, inlets_of
from dflop_jax.generate.prompt import NO_MEDIA, Media, prompt_sample
from dflop_jax.generate.row import LLM, row_of, with_features
from dflop_jax.generate.sampling import Sampling, choose
from dflop_jax.train.load_params import load_params
from dflop_jax.train.prepare import build_model
from dflop_jax.train.stages import adapted

TOKEN_MULTIPLE = 128  # of a row and of the slots for its answer: each other number compiles anew
OnText = Callable[[str], None]


@dataclass(frozen=True)
class ChatAnswer:
    """What a model said.

    Attributes:
      tokens: ids of the answer, without the end token.
      stopped: "end" where the model ended its turn, "length" where `max_tokens` did.
      tiles, windows: pieces of what is seen (tiles, pictures at native resolution, frames), and
        windows of sound.
      step: optimizer steps of the checkpoint.
      first_token_s: until the first token was there, compilation included.
      token_s: mean time of each further one, compilation included; 0 without any.
    """

    prompt: str
    answer: str
    tokens: tuple[int, ...]
    stopped: str
    tiles: int
    prompt_tokens: int
    step: int
    checkpoint: str
    first_token_s: float
    token_s: float
    windows: int = 0


class RowArrays(NamedTuple):
    """A `Row`'s arrays, here or on a device."""

    media: Mapping[str, Mapping[str, Any]]
    fields: dict[str, Any]
    places: Mapping[str, tuple[Any, ...]]


class Draw(NamedTuple):
    """What tokens are drawn with."""

    key: Array
    temperature: Any
    top_p: Any


class Generator:
    """A trained model, ready to answer.

    Args:
      config: what it was trained with; its model, tokenizer and limits on tiles and tokens count.
      run: a run folder (its newest whole checkpoint) or a checkpoint in it.

    Raises:
      ValueError: the model cannot be built or does not generate, or there is no such checkpoint.
    """

    def __init__(self, config: Config, run: str | Path, device: jax.Device | None = None):
        self._config = config
        self._model = adapted(build_model(config.model), config.train)
        device = device or jax.devices()[0]
        chip = chip_of(device)
        llm: Any = on_chip(self._model.modules[LLM], chip)
        if not hasattr(llm, "memory") or not hasattr(llm, "logits"):
            raise ValueError(
                f"model.factory={config.model.factory!r}: its llm has no memory and logits "
                "(dflop_jax.contract.GeneratingModule); add them, or take another model"
            )
        kinds = MediaSpec.of(self._model.preprocessing, self._model.piece_tokens).kinds
        self._tokenizer = any_tokenizer(config.data.tokenizer, self._model.vocab_size, kinds)
        self._loaded = load_params(run, self._model, device)
        self._prefill = jax.jit(partial(prefill, self._model, chip), static_argnames="slots")
        self._step = jax.jit(partial(step, llm), donate_argnums=1)

    def answer(
        self,
        prompt: str,
        media: Media = NO_MEDIA,
        sampling: Sampling | None = None,
        on_text: OnText | None = None,
    ) -> ChatAnswer:
        """Answer a prompt about media, or about none; `on_text` gets the text as it comes.

        Raises:
          ValueError: see `prompt_sample`.
        """
        how = sampling or Sampling()
        sample = prompt_sample(prompt, media, self._config.data, self._model, self._tokenizer)
        row = row_of([sample], self._model, TOKEN_MULTIPLE)
        n = row.length
        slots = -(-(n + how.max_tokens) // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        key = jax.random.key(how.seed)
        draw = Draw(key, np.float32(how.temperature), np.float32(how.top_p))
        start = time.perf_counter()
        params = self._loaded.params
        arrays = RowArrays(row.media, row.fields, row.places)
        last = np.array([n - 1], np.int32)
        token, cache = self._prefill(params, arrays, last, draw, slots=slots)
        tokens = [int(token[0])]
        first_token_s = time.perf_counter() - start
        text = _Text(self._tokenizer, on_text)
        end = self._tokenizer.im_end_id
        while tokens[-1] != end:
            text.show(tokens)
            if len(tokens) == how.max_tokens:
                break
            position = np.array([n + len(tokens) - 1], np.int32)
            token, cache = self._step(params[LLM], cache, token, position, draw)
            tokens.append(int(token[0]))
        further = len(tokens) - 1
        token_s = (time.perf_counter() - start - first_token_s) / further if further else 0.0
        ended = tokens[-1] == end
        said = tokens[: len(tokens) - ended]
        return ChatAnswer(
            prompt=prompt,
            answer=text.finish(said),
            tokens=tuple(said),
            stopped="end" if ended else "length",
            tiles=row.pieces.get("vision", 0),
            windows=row.pieces.get("audio", 0),
            prompt_tokens=n,
            step=self._loaded.step,
            checkpoint=str(self._loaded.folder),
            first_token_s=first_token_s,
            token_s=token_s,
        )


def prefill(
    model: MultimodalModel,
    chip: str,
    params: dict[str, Params],
    row: RowArrays,
    last: Array,
    draw: Draw,
    *,
    slots: int,
) -> tuple[Array, Any]:
    """Return the first token, int32 [1], of the answer to a row, and a cache, by what the chip runs
    best."""
    llm: Any = on_chip(model.modules[LLM], chip)
    batch = with_features(model, chip, params, row.fields, row.media, row.places)
    logits, cache = decoding.prefill(llm, params[LLM], batch, last, slots, inlets_of(model))
    return choose(logits, jax.random.fold_in(draw.key, 0), draw.temperature, draw.top_p), cache


def step(
    llm: GeneratingModule,
    params: Params,
    cache: Any,
    token: Array,
    position: Array,
    draw: Draw,
) -> tuple[Array, Any]:
    """Return the token, int32 [1], after `token` at `position`, and the cache."""
    logits, cache = decode(llm, params, cache, token, position)
    key = jax.random.fold_in(draw.key, position[0])
    return choose(logits, key, draw.temperature, draw.top_p), cache


class _Text:
    """Text of the tokens so far, shown as it grows; half a character waits for its rest."""

    def __init__(self, tokenizer: Tokenizer | ChatTokenizer, on_text: OnText | None):
        self._tokenizer, self._on_text = tokenizer, on_text
        self._shown = 0

    def show(self, tokens: Sequence[int]) -> None:
        text = self._tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):
            self._emit(text)

    def finish(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(tokens)
        self._emit(text)
        return text

    def _emit(self, text: str) -> None:
        if self._on_text and len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)
