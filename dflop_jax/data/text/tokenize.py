"""Tokenizers, the ChatML encoding of conversations as token runs, and the loss weights of answers.
For a model's folder `transformers` resolves the tokenizer and its chat template."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import tokenizers

from dflop_jax.data.bounds import MAX_TOKENIZER_BYTES, errors_as, parse_json, read_bounded
from dflop_jax.data.media.kind import BUILT_IN, tag_of

TOKENIZER = "tokenizer.json"
MAX_PADDING_ROWS = 1024  # maximum padding of an embedding to a round size, or 1/64 of its rows
ANSWER_TOKENS = 32  # tokens of its first answer that a cut conversation must keep, or all of it
TAG = tag_of(BUILT_IN)
BREAK = "\ufdd2"  # escapes tags and special tokens in text; encoding drops it
BYTE_TOKENIZER = "bytes"  # the tokenizer that needs no file
WEIGHT_FIELD = "weight"  # field of a turn or of a record
LOSS_SWITCHES = ("loss", "train")  # fields of a turn; a false value means weight 0
_ON_VALUES, _OFF_VALUES = (None, True, "true"), (False, "false")  # 1 equals True, 0 False
ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
# special tokens that ChatML needs, and their possible names in a tokenizer.json
SPECIAL_TOKENS = {
    "im_start_id": ("<|im_start|>",),
    "im_end_id": ("<|im_end|>",),
    "placeholder_id": ("<|image_pad|>", "<image>", "<|visual|>"),  # for media of all kinds
    "pad_id": ("<|endoftext|>", "<pad>", "<|pad|>", "[PAD]"),
}


@dataclass(frozen=True)
class FolderTokenizer:
    """A folder's tokenizer files as resolved by `transformers`."""

    backend: str  # text of a tokenizer.json
    named: Mapping[str, str]  # special tokens by the names that templates use, such as image_token
    template: str  # chat template of the processor, or else of the tokenizer


def resolve_tokenizer(folder: Path) -> FolderTokenizer:
    """Return the tokenizer and chat template of a folder. ValueError: one is missing or cannot be
    read, or tokenizer.json lacks a special token that the configuration names."""
    file = folder / TOKENIZER
    if not file.is_file():
        raise ValueError(f"{file}: no such file; data.tokenizer names a model's folder")
    changed = tuple(sorted((f.name, f.stat().st_mtime_ns) for f in folder.glob("*.j*")))
    return _resolve_folder(folder, changed)


@lru_cache(8)
def _resolve_folder(folder: Path, _: tuple[tuple[str, int], ...]) -> FolderTokenizer:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it warns that torch is missing
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
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    text = (folder / TOKENIZER).read_text(encoding="utf-8")
    for token in [*named.values(), *map(str, tokenizer.all_special_tokens)]:
        if json.dumps(token) not in text and json.dumps(token, ensure_ascii=False) not in text:
            raise ValueError(
                f"{folder}: tokenizer_config.json names {token!r}, which {TOKENIZER} lacks; take "
                "both files from one model"
            )
    return FolderTokenizer(tokenizer.backend_tokenizer.to_str(), named, template)


def parse_tokenizer(text: bytes) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json's text. It encodes special tokens as plain text,
    without truncation or padding. Invalid text raises an error of the library, or ValueError."""
    tokenizer = tokenizers.Tokenizer.from_buffer(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise ValueError("it has no tokens")
    return tokenizer


class FileEncoding:
    """Base class of tokenizers that are read from a file."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def encoding(self, text: str) -> tokenizers.Encoding:
        """Return the encoding of a text. ValueError: the tokenizer fails."""
        with errors_as("the tokenizer fails"):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a special token in it is encoded as plain text."""
        return self.encoding(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_with_special(self, ids: Iterable[int]) -> str:
        """Return the text of the ids with the names of special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def check_embedding(vocab_size: int, embedding_size: int, name: str) -> None:
    """Raise ValueError if a tokenizer does not fit an embedding of `embedding_size` rows."""
    n_padding_rows = max(MAX_PADDING_ROWS, embedding_size // 64)
    if vocab_size > embedding_size or vocab_size + n_padding_rows < embedding_size:
        raise ValueError(
            f"{name}: the tokenizer has {vocab_size} ids, the model's embedding {embedding_size} "
            "rows; take the tokenizer of this model"
        )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no file. ValueError: not an object."""
    if not file.is_file():
        return {}
    with errors_as(f"{file}: not a JSON object"):
        return parse_json(read_bounded(file, MAX_TOKENIZER_BYTES), dict[str, Any])


class ByteTokenizer:
    """A tokenizer whose ids are UTF-8 bytes, 0-255, and four special ids."""

    pad_id, im_start_id, im_end_id, placeholder_id = 256, 257, 258, 259
    vocab_size = 260

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def decode_with_special(self, ids: Iterable[int]) -> str:
        names = {
            self.pad_id: b"<|pad|>",
            self.im_start_id: b"<|im_start|>",
            self.im_end_id: b"<|im_end|>",
            self.placeholder_id: b"<|media|>",
        }
        return b"".join(names.get(i) or bytes([i]) for i in ids).decode("utf-8", "replace")


class FileTokenizer(FileEncoding):
    """A Hugging Face tokenizer.json with ChatML tokens and a placeholder token of media.
    ValueError: no such file, not a tokenizer, or one of these tokens is missing."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such tokenizer.json; leave it empty for byte-level")
        with errors_as(f"{path}: not a tokenizer.json", "; name one, or the model's folder"):
            super().__init__(parse_tokenizer(read_bounded(Path(path), MAX_TOKENIZER_BYTES)))
        ids = {}
        for name, names in SPECIAL_TOKENS.items():
            token_ids = (self._tokenizer.token_to_id(n) for n in names)
            ids[name] = next((i for i in token_ids if i is not None), -1)
            if ids[name] < 0:
                raise ValueError(
                    f"{path}: lacks {' or '.join(names)}; add it to added_tokens as a special one"
                )
        self.im_start_id, self.im_end_id = ids["im_start_id"], ids["im_end_id"]
        self.placeholder_id, self.pad_id = ids["placeholder_id"], ids["pad_id"]


Tokenizer = ByteTokenizer | FileTokenizer  # tokenizers without a chat template


@dataclass(frozen=True)
class TemplateFields:
    """Inputs that a record gives its chat template in addition to the turns."""

    # other fields of each turn's message (reasoning_content, tool_calls); () if there are none
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # such as tools, enable_thinking

    @property
    def names(self) -> set[str]:
        return set(self.variables).union(*self.messages)


NO_FIELDS = TemplateFields()


@dataclass(frozen=True)
class TokenRun:
    """A run of text tokens, or the position of a medium's tokens (medium >= 0)."""

    ids: tuple[int, ...] = ()
    supervised: bool = False
    medium: int = -1
    weight: float = 1.0  # loss weight of each token, if supervised
    answer: int = -1  # number of the answer in its record, from 0; -1: none, or unknown


def encode_chatml(
    turns: Sequence[tuple[str, str]], tokenizer: Tokenizer, tag: re.Pattern[str] = TAG
) -> tuple[TokenRun, ...]:
    """Return turns (a role of `ROLES`, text) as ChatML; answers and their end-of-turn tokens are
    supervised. The k-th match of `tag` (see `kind.tag_of`) becomes medium k."""
    runs: list[TokenRun] = []
    n_media = n_answers = 0
    newline = tuple(tokenizer.encode("\n"))
    for t, (role, text) in enumerate(turns):
        answer = role == "gpt"
        number = n_answers if answer else -1
        head = (tokenizer.im_start_id, *tokenizer.encode(ROLES[role] + "\n"))
        runs.append(TokenRun((newline if t else ()) + head))
        for k, text_between in enumerate(tag.split(text)[::2]):
            if k:
                runs.append(TokenRun(medium=n_media))
                n_media += 1
            if text_between:
                ids = tuple(tokenizer.encode(text_between.replace(BREAK, "")))
                runs.append(TokenRun(ids, answer, answer=number))
        runs.append(TokenRun((tokenizer.im_end_id,), answer, answer=number))
        n_answers += answer
    return tuple(runs)


def escape_tags(text: str, kinds: Iterable[str]) -> str:
    """Return the text with the tags of these kinds escaped, so they mark no media."""
    for kind in kinds:
        text = text.replace(f"<{kind}>", f"<{BREAK}{kind}>")
    return text


def count_text_tokens(runs: Sequence[TokenRun]) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Return the index columns of a conversation's text and of each medium's position.
    `needed_tokens`, which a cut conversation keeps, end after ANSWER_TOKENS of the first answer or
    at its end; `tokens_before` a medium counts text tokens, and each earlier medium as one."""
    first = next((k for k, p in enumerate(runs) if p.supervised), len(runs))
    answer = takewhile(lambda p: p.supervised or p.medium >= 0, runs[first:])
    needed = sum(len(p.ids) for p in runs[:first])
    needed += min(sum(len(p.ids) for p in answer), ANSWER_TOKENS)
    starts = accumulate((len(p.ids) + (p.medium >= 0) for p in runs), initial=0)
    media_positions = sorted((p.medium, n) for p, n in zip(runs, starts) if p.medium >= 0)
    text = {"text_tokens": sum(len(p.ids) for p in runs), "needed_tokens": needed}
    return text, [{"tokens_before": n} for _, n in media_positions]


def truncate_runs(runs: Iterable[TokenRun], n: int) -> list[TokenRun]:
    """Return the first n tokens of a conversation, counting each medium as one."""
    kept_runs = []
    for p in runs:
        if n > 0:
            kept_runs.append(replace(p, ids=p.ids[:n]))
        n -= len(p.ids) + (p.medium >= 0)
    return kept_runs


def answer_weights(
    turns: Sequence[Any], roles: Sequence[str], record_weight: Any
) -> tuple[float, ...]:
    """Return the weight of each answer of a record: the turn's weight times the record's, each 1 by
    default, or 0 if `loss` or `train` of the turn is false, 0 or "false"; () if all are 1.
    ValueError: an invalid weight or switch, or a weight of a turn that is not an answer."""
    common_weight = _weight(record_weight, "the record")
    weights = []
    for k, (turn, role) in enumerate(zip(turns, roles, strict=True)):
        fields = turn if isinstance(turn, Mapping) else {}
        switches = {name: fields.get(name) for name in LOSS_SWITCHES}
        for name, value in switches.items():
            if value not in _ON_VALUES + _OFF_VALUES:
                raise ValueError(f"{name} of turn {k} is {value!r:.50}; give true or false")
        turn_weight = fields.get(WEIGHT_FIELD)
        if role == "gpt":
            is_trained = not any(value in _OFF_VALUES for value in switches.values())
            weights.append(common_weight * _weight(turn_weight, f"turn {k}") * is_trained)
        elif turn_weight is not None:
            raise ValueError(f"turn {k} has a weight but is not an answer")
    return () if all(w == 1.0 for w in weights) else tuple(weights)


def _weight(value: Any, owner: str) -> float:
    if value is None:
        return 1.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"the weight of {owner} is {value!r:.50}, not a number, 0 or above")
    return float(value)


def weight_runs(
    runs: Sequence[TokenRun], weights: Sequence[float], *, prompts: bool
) -> tuple[TokenRun, ...]:
    """Return the runs with the weights of their answers (empty: 1 each). `prompts`: all other text
    is supervised, too. ValueError: the template does not tell answers apart."""
    weighted = []
    for p in runs:
        if weights and p.supervised:
            if p.answer < 0:
                raise ValueError(
                    f"the chat template marks other text than its {len(weights)} answers as "
                    "generated, so answers cannot have weights"
                )
            p = replace(p, weight=weights[p.answer])
        elif prompts and p.medium < 0:
            p = replace(p, supervised=True)
        weighted.append(p)
    return tuple(weighted)
