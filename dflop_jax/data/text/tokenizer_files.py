"""Tokenizers in files, and those of a model's folder as `transformers` resolves them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from dflop_jax.data.bounds import MAX_TOKENIZER_BYTES, errors_as, parse_json, read_bounded

TOKENIZER = "tokenizer.json"
MAX_PADDING_ROWS = 1024  # embeddings are padded to round sizes, by so many rows or 1/64 of them


@dataclass(frozen=True)
class FolderTokenizer:
    """What `transformers` makes of a folder's tokenizer files.

    Attributes:
      backend: the tokenizer as the text of a tokenizer.json.
      named: special tokens by the names that chat templates know them by, such as image_token.
      template: the processor's chat template, or else the tokenizer's.
    """

    backend: str
    named: Mapping[str, str]
    template: str


def resolve_tokenizer(folder: Path) -> FolderTokenizer:
    """Return the tokenizer and chat template of a folder.

    Raises:
      ValueError: no tokenizer.json, one that cannot be read, no chat template, or a special token
        that the configuration names and tokenizer.json lacks.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        raise ValueError(f"{file}: no such file; data.tokenizer names a model's folder")
    changed = tuple(sorted((f.name, f.stat().st_mtime_ns) for f in folder.glob("*.j*")))
    return _resolve_folder(folder, changed)


@lru_cache(8)
def _resolve_folder(folder: Path, _: tuple[tuple[str, int], ...]) -> FolderTokenizer:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would say that torch is missing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer
        from transformers.processing_utils import ProcessorMixin

        with errors_as(f"{folder}: its tokenizer cannot be read", "; download its files again"):
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            processor, _unused = ProcessorMixin.get_processor_dict(str(folder))
    template = processor.get("chat_template") or tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{folder}: no chat template; put the model's chat_template.jinja beside {TOKENIZER}"
        )
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    tokenizer_text = (folder / TOKENIZER).read_text(encoding="utf-8")
    for token in [*tokens.values(), *map(str, tokenizer.all_special_tokens)]:
        if not any(
            json.dumps(token, ensure_ascii=ascii) in tokenizer_text for ascii in (False, True)
        ):
            raise ValueError(
                f"{folder}: tokenizer_config.json names {token!r}, which {TOKENIZER} lacks; take "
                "both files from one model"
            )
    return FolderTokenizer(tokenizer.backend_tokenizer.to_str(), tokens, template)


def load_tokenizer(file: str | Path) -> tokenizers.Tokenizer:
    """A tokenizer.json that exists, for whole texts whose special tokens are plain text.

    ValueError when it is something else.
    """
    with errors_as(f"{file}: not a tokenizer.json", "; name one, or the model's folder"):
        return parse_tokenizer(read_bounded(Path(file), MAX_TOKENIZER_BYTES))


def parse_tokenizer(text: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of such a file's text; an error of the library, or a ValueError, for others."""
    tokenizer = tokenizers.Tokenizer.from_buffer(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise ValueError("it has no tokens")
    return tokenizer


def encode_text(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """A text's tokens; ValueError where the tokenizer fails on it."""
    with errors_as("the tokenizer fails"):
        return tokenizer.encode(text, add_special_tokens=False)


class FileEncoding:
    """What a tokenizer of a file has beside its special tokens, see `tokenize.Tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_with_special(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def check_embedding(vocab_size: int, embedding_size: int, name: str) -> None:
    """ValueError unless a tokenizer of `vocab_size` ids fits an embedding of so many rows."""
    n_padding_rows = max(MAX_PADDING_ROWS, embedding_size // 64)
    if vocab_size > embedding_size or vocab_size + n_padding_rows < embedding_size:
        raise ValueError(
            f"{name}: the tokenizer has {vocab_size} ids, the model's embedding {embedding_size} "
            "rows; take the tokenizer of this model"
        )


def read_json(file: Path) -> dict[str, Any]:
    """The object of a JSON file, empty without one. ValueError when it is something else."""
    if not file.is_file():
        return {}
    with errors_as(f"{file}: not a JSON object"):
        return parse_json(read_bounded(file, MAX_TOKENIZER_BYTES), dict[str, Any])
