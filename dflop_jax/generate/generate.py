"""Generate answers with a trained model, in batches.

Each prompt of a batch has its own row. Numbers of rows, tokens and cache slots are rounded up to a
few sizes, so that new prompts rarely compile a program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.data import MediaSpec, Sample
from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.text.chat import AnyTokenizer, ChatTokenizer
from dflop_jax.data.text.tokenize import TokenRun, read_json
from dflop_jax.generate.programs import (
    DATA,
    TOKEN_MULTIPLE,
    AnswerPrograms,
    answer_mesh,
    min_tp,
    param_structs,
)
from dflop_jax.generate.prompt import NO_MEDIA, Media, prompt_sample
from dflop_jax.generate.row import LLM, pack_rows
from dflop_jax.generate.sampling import Sampling
from dflop_jax.train.load_params import LoadedParams, load_params
from dflop_jax.train.run_context import build_trained_model
from dflop_jax.weights import Folder, read_config, read_params

OnText = Callable[[str], None]


@dataclass(frozen=True)
class AnswerText:
    """The text and tokens of an answer."""

    text: str
    tokens: tuple[int, ...]  # without the end token; with the tokens of a stop text
    stopped: str  # by the model ("end"), a stop text ("stop") or `max_tokens` ("length")


@dataclass(frozen=True)
class ChatAnswer:
    """A prompt's answer with statistics; see `AnswerText`. Seconds include compilation."""

    prompt: str
    answer: str
    tokens: tuple[int, ...]
    stopped: str
    tiles: int  # pieces of vision input: tiles, pictures at native resolution, or frames
    prompt_tokens: int
    step: int  # optimizer steps of the checkpoint
    checkpoint: str
    first_token_s: float
    token_s: float  # mean seconds of each later token; 0 if there is none
    windows: int = 0  # of audio


class Generator:
    """A trained model with its parameters loaded and its programs ready to answer prompts.

    Args:
      config: the training configuration; model, tokenizer and limits on tiles and tokens are used.
      run: a run folder (its newest complete checkpoint), a checkpoint in it, or published weights.
      devices: devices of this process; None: all of them.
      rows: number of prompts that are answered together.
      tp: tensor-parallel degree; 0: the lowest at which parameters fit into memory.

    Raises:
      ValueError: the model cannot generate, there is no checkpoint, or `tp` does not divide the
        number of devices.
    """

    def __init__(
        self,
        config: Config,
        run: str | Path,
        devices: Sequence[jax.Device] | None = None,
        *,
        rows: int = 1,
        tp: int = 0,
    ):
        self.config = config
        self.model = build_trained_model(config)
        devices = devices or jax.local_devices()
        self.mesh = answer_mesh(devices, tp or min_tp(self.model, devices), rows)
        self.ranks = int(self.mesh.shape[DATA])
        self.rows = -(-rows // self.ranks)  # of a data rank
        self.programs = AnswerPrograms(self.model, self.mesh)
        kinds = MediaSpec.of(self.model.preprocessing, self.model.piece_tokens).kinds
        self.tokenizer = open_tokenizer(config.data.tokenizer, self.model.vocab_size, kinds)
        self.end_ids = end_token_ids(self.tokenizer, run)
        structs = {m: param_structs(module, self.mesh) for m, module in self.model.modules.items()}
        if is_published(run):
            self.loaded = published_params(run, self.model, structs)
        else:
            self.loaded = load_params(run, self.model, structs)

    def answer(
        self,
        prompt: str,
        media: Media = NO_MEDIA,
        sampling: Sampling | None = None,
        on_text: OnText | None = None,
    ) -> ChatAnswer:
        """Answer a prompt with or without media; `on_text` is called with each new piece of text.
        ValueError: see `prompt.prompt_sample`."""
        sample = self.sample(prompt, media)
        start = time.perf_counter()
        times = list[float]()
        (answer,) = self.answers([sample], sampling or Sampling(), on_text=on_text, times=times)
        further = len(times) - 1
        return ChatAnswer(
            prompt=prompt,
            answer=answer.text,
            tokens=answer.tokens,
            stopped=answer.stopped,
            tiles=len(sample.load.lengths("vision")),
            windows=len(sample.load.lengths("audio")),
            prompt_tokens=sample.load.tokens(LLM),
            step=self.loaded.step,
            checkpoint=str(self.loaded.folder),
            first_token_s=times[0] - start,
            token_s=(times[-1] - times[0]) / further if further else 0.0,
        )

    def sample(self, prompt: str, media: Media = NO_MEDIA) -> Sample:
        return prompt_sample(prompt, media, self.config.data, self.model, self.tokenizer)

    def answers(
        self,
        samples: Sequence[Sample],
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        *,
        on_text: OnText | None = None,
        times: list[float] | None = None,
    ) -> list[AnswerText]:
        """Answer at most `rows` prompts together.

        Args:
          numbers: each answer's number, which seeds its sampling; None: 0, 1, ...
          on_text: called with each new piece of the first answer's text.
          times: the time at which each token arrives is appended, in seconds.
        """
        row_indices = [k % self.ranks * self.rows + k // self.ranks for k in range(len(samples))]
        number = np.zeros(self.ranks * self.rows, np.uint32)
        number[row_indices] = range(len(samples)) if numbers is None else numbers
        rows = pack_rows(samples, self.model, self.ranks, self.rows, TOKEN_MULTIPLE)
        streams = [
            _AnswerStream(self.tokenizer, self.end_ids, sampling, on_text if k == 0 else None)
            for k in range(len(row_indices))
        ]
        for tokens in self.programs.tokens(self.loaded.params, rows, number, sampling):
            if times is not None:
                times.append(time.perf_counter())
            for stream, row in zip(streams, row_indices, strict=True):
                stream.add(int(tokens[row]))
            if all(stream.stopped for stream in streams):
                break
        return [stream.answer for stream in streams]


def is_published(folder: str | Path) -> bool:
    """Return whether a folder has a model as transformers writes it."""
    with suppress(ValueError):  # the folder or its config.json is missing
        return "model_type" in read_config(Path(folder))
    return False


def published_params(
    folder: str | Path, model: MultimodalModel, structs: Mapping[str, Params]
) -> LoadedParams:
    """Read a model from a folder of transformers; ValueError if it has another model."""
    weights: Any = getattr(model, "weights", None)
    if weights is None:
        raise ValueError(f"{folder}: a {type(model).__name__} has no published form; name a run")
    opened = Folder(folder, weights)
    opened.check()
    params = {m: read_params(opened, m, structs[m]) for m in model.modules}
    return LoadedParams(params, 0, Path(folder))


def end_token_ids(tokenizer: AnyTokenizer, run: str | Path) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's, the last supervised one of a turn, and
    every eos_token_id in generation_config.json of the tokenizer's folder or of `run`."""
    ids = {tokenizer.im_end_id}
    folders = [Path(run)]
    if isinstance(tokenizer, ChatTokenizer):
        folders.append(tokenizer.folder)
        pieces: Sequence[TokenRun] = ()
        with suppress(ValueError):  # the chat template does not mark answers
            pieces = tokenizer.encode_turns([("human", "?"), ("gpt", "!")])
        supervised = [i for p in pieces if p.supervised for i in p.ids]
        if supervised and not tokenizer.decode(supervised[-1:]):  # a special token, no text
            ids.add(supervised[-1])
    for folder in folders:
        eos_ids = read_json(folder / "generation_config.json").get("eos_token_id")
        ids.update(eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids])
    return frozenset(ids)


class _AnswerStream:
    """A growing answer; shows its text except for an incomplete character or possible stop text."""

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        ends: frozenset[int],
        sampling: Sampling,
        on_text: OnText | None = None,
    ):
        self._tokenizer, self._ends = tokenizer, ends
        self._sampling, self._on_text = sampling, on_text
        self._tokens = list[int]()
        self._n_shown = 0
        self.stopped = ""
        self._text = ""

    def add(self, token: int) -> None:
        """Append a token, unless the answer has ended."""
        if self.stopped:
            return
        if token in self._ends:
            self._end("end")
            return
        self._tokens.append(token)
        is_long = len(self._tokens) == self._sampling.max_tokens
        if not (is_long or self._on_text or self._sampling.stop):
            return
        self._text = self._tokenizer.decode(self._tokens)
        if (cut := self._sampling.cut_at_stop(self._text)) is not None:
            self._text = cut
            self._end("stop")
        elif is_long:
            self._end("length")
        elif not self._text.endswith("\ufffd"):
            self._show(len(self._text) - self._n_partial_stop)

    @property
    def answer(self) -> AnswerText:
        return AnswerText(self._text, tuple(self._tokens), self.stopped)

    @property
    def _n_partial_stop(self) -> int:
        """Number of characters at the end of the text that may begin a stop text."""
        stops = self._sampling.stop
        longest = min(max(map(len, stops), default=0) - 1, len(self._text))
        for n in range(longest, 0, -1):
            if any(stop.startswith(self._text[-n:]) for stop in stops):
                return n
        return 0

    def _end(self, reason: str) -> None:
        self.stopped = reason
        if reason == "end":
            self._text = self._tokenizer.decode(self._tokens)
        self._show(len(self._text))

    def _show(self, stop: int) -> None:
        if self._on_text and stop > self._n_shown:
            self._on_text(self._text[self._n_shown : stop])
            self._n_shown = stop
