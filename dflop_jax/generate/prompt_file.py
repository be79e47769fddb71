"""Answer a file of prompts in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflop_jax.data import Sample
from dflop_jax.data.bounds import strip_byte_order_mark
from dflop_jax.generate.generate import AnswerText, Generator
from dflop_jax.generate.prompt import Media
from dflop_jax.generate.row import LLM
from dflop_jax.generate.sampling import Sampling

BATCHES_AHEAD = 8  # batches sorted by length together; more batches: less padding, more memory


@dataclass(frozen=True)
class FilePrompt:
    text: str
    media: Media


@dataclass(frozen=True)
class FileAnswer:
    """The answer to a prompt of a file (see `AnswerText`), or the error in the prompt."""

    prompt: str
    answer: str = ""
    tokens: tuple[int, ...] = ()
    stopped: str = ""
    error: str = ""


class _PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    image: str | list[str] = []
    video: str | list[str] = []
    audio: str | list[str] = []


def read_prompts(file: str | Path) -> list[FilePrompt]:
    """Read prompts from a file of JSON lines: {"prompt": TEXT}, optionally with "image", "video" or
    "audio": a file or a list, relative to the prompt file's folder. ValueError names a bad line."""
    file = Path(file)
    try:
        lines = strip_byte_order_mark(file.read_bytes()).split(b"\n")
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    except OSError as e:
        raise ValueError(f"{file}: {(e.strerror or str(e)).lower()}; check --prompts") from None
    prompts = []
    for n, json_line in enumerate(lines, 1):
        if not json_line.strip():
            continue
        try:
            read = msgspec.json.decode(json_line, type=_PromptLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            form = '{"prompt": TEXT, "image": [FILE]}'
            raise ValueError(f"{file}:{n}: {e}; write {form}") from None
        media = {}
        for kind in ("image", "video", "audio"):
            files = getattr(read, kind)
            media[kind] = [file.parent / f for f in ([files] if isinstance(files, str) else files)]
        prompts.append(FilePrompt(read.prompt, media))
    if not prompts:
        raise ValueError(f"{file}: is empty; write one line per prompt")
    return prompts


def answer_prompts(
    generator: Generator, prompts: Sequence[FilePrompt], sampling: Sampling
) -> Iterator[FileAnswer]:
    """Yield the answers in the prompts' order, while `data.workers` threads decode the media of
    later prompts."""

    def prepare(prompt: FilePrompt) -> Sample | str:
        try:
            return generator.sample(prompt.text, prompt.media)
        except ValueError as e:
            return " ".join(str(e).split())

    rows = generator.rows * generator.ranks
    size = BATCHES_AHEAD * rows
    with ThreadPoolExecutor(generator.config.data.workers) as pool:
        pending = [pool.submit(prepare, p) for p in prompts[:size]]
        for first in range(0, len(prompts), size):
            prepared = [p.result() for p in pending]
            pending = [pool.submit(prepare, p) for p in prompts[first + size : first + 2 * size]]
            samples = {k: s for k, s in enumerate(prepared) if isinstance(s, Sample)}
            by_length = sorted(samples, key=lambda k: samples[k].load.tokens(LLM))
            answer_texts: dict[int, AnswerText] = {}
            for start in range(0, len(by_length), rows):
                batch = by_length[start : start + rows]
                numbers = [first + k for k in batch]
                answers = generator.answers([samples[k] for k in batch], sampling, numbers)
                answer_texts.update(zip(batch, answers, strict=True))
            for k, error in enumerate(prepared):
                text = prompts[first + k].text
                if isinstance(error, str):
                    yield FileAnswer(text, error=error)
                else:
                    a = answer_texts[k]
                    yield FileAnswer(text, a.text, a.tokens, a.stopped)
