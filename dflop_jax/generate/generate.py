"""Answers of a trained model, in batches.

A batch is prompts of about one length, each in a row of its own. Rows, tokens and slots come in few
sizes, so that other prompts compile nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from dflop_jax.config import Config
from dflop_jax.data import MediaSpec, Sample
from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.text.chat import AnyTokenizer
from dflop_jax.generate.mesh import DATA, answer_mesh, min_tp, param_structs
from dflop_jax.generate.programs import TOKEN_MULTIPLE, AnswerPrograms
from dflop_jax.generate.prompt import NO_MEDIA, Media, prompt_sample
from dflop_jax.generate.published import end_token_ids, is_published, published_params
from dflop_jax.generate.row import LLM, AnswerRows, pack_rows
from dflop_jax.generate.sampling import Sampling
from dflop_jax.train.load_params import load_params
from dflop_jax.train.run_context import build_trained_model

OnText = Callable[[str], None]


@dataclass(frozen=True)
class AnswerText:
    """An answer.

    Attributes:
      tokens: its ids, without the end token; with those of a stop text.
      stopped: "end" where the model ended its turn, "stop" at a stop text, "length" where
        `max_tokens` did.
    """

    text: str
    tokens: tuple[int, ...]
    stopped: str


@dataclass(frozen=True)
class ChatAnswer:
    """What a model said.

    Attributes:
      tokens, stopped: see `AnswerText`.
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


class Generator:
    """A trained model, ready to answer.

    Args:
      config: what it was trained with; its model, tokenizer and limits on tiles and tokens count.
      run: a run folder (its newest whole checkpoint), a checkpoint in it, or a folder of published
        weights.
      devices: of this process; None: all of them.
      rows: prompts that are answered at once.
      tp: devices that share one copy of the parameters; 0: as few as hold them.

    Raises:
      ValueError: the model cannot be built or does not generate, there is no such checkpoint, or
        the devices cannot be shared so.
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
        self.ends = end_token_ids(self.tokenizer, run)
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
        """Answer a prompt about media, or about none; `on_text` gets the text as it comes.

        Raises:
          ValueError: see `prompt.prompt_sample`.
        """
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
        """A prompt as the model takes it; see `prompt.prompt_sample`."""
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
        """Answer prompts together, up to `rows` of the generator.

        Args:
          numbers: of the answers among all that are drawn, by which draws differ; None: from 0.
          on_text: gets the first one's text as it comes.
          times: gets the time at which each token was there.
        """
        rows, number, row_indices = self._rows(
            samples, range(len(samples)) if numbers is None else numbers
        )
        streams = [
            _AnswerStream(self.tokenizer, self.ends, sampling, on_text if k == 0 else None)
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

    def _rows(
        self, samples: Sequence[Sample], numbers: Sequence[int]
    ) -> tuple[AnswerRows, np.ndarray, list[int]]:
        """(rows of some prompts, the number of each row's answer, the row of each prompt)."""
        row_indices = [k % self.ranks * self.rows + k // self.ranks for k in range(len(samples))]
        number = np.zeros(self.ranks * self.rows, np.uint32)
        number[row_indices] = numbers
        return (
            pack_rows(samples, self.model, self.ranks, self.rows, TOKEN_MULTIPLE),
            number,
            row_indices,
        )


class _AnswerStream:
    """An answer as it grows; its text is shown as far as it is certain: half a character, or what
    may begin a stop text, waits for its rest."""

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        ends: frozenset[int],
        sampling: Sampling,
        on_text: OnText | None = None,
    ):
        self._tokenizer, self._ends, self._sampling, self._on_text = (
            tokenizer,
            ends,
            sampling,
            on_text,
        )
        self._tokens = list[int]()
        self._n_shown = 0
        self.stopped = ""
        self._text = ""

    def add(self, token: int) -> None:
        """Take the next token, unless the answer has ended."""
        if self.stopped:
            return
        if token in self._ends:
            self._end("end")
            return
        self._tokens.append(token)
        if (
            not (self._on_text or self._sampling.stop)
            and len(self._tokens) < self._sampling.max_tokens
        ):
            return
        self._text = self._tokenizer.decode(self._tokens)
        if (cut := self._sampling.cut(self._text)) is not None:
            self._text = cut
            self._end("stop")
        elif len(self._tokens) == self._sampling.max_tokens:
            self._end("length")
        elif not self._text.endswith("\ufffd"):
            self._show(len(self._text) - self._n_partial_stop)

    @property
    def answer(self) -> AnswerText:
        return AnswerText(self._text, tuple(self._tokens), self.stopped)

    @property
    def _n_partial_stop(self) -> int:
        """Characters at the end of the text with which a stop text may begin."""
        longest = max(map(len, self._sampling.stop), default=0)
        halves = range(min(longest - 1, len(self._text)), 0, -1)
        ends = (
            n for n in halves if any(s.startswith(self._text[-n:]) for s in self._sampling.stop)
        )
        return next(ends, 0)

    def _end(self, reason: str) -> None:
        self.stopped = reason
        if reason == "end":
            self._text = self._tokenizer.decode(self._tokens)
        self._show(len(self._text))

    def _show(self, stop: int) -> None:
        if self._on_text and stop > self._n_shown:
            self._on_text(self._text[self._n_shown : stop])
            self._n_shown = stop
