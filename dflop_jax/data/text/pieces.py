"""Tokenizers and the chat template that turns a conversation into pieces of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Protocol

from dflop_jax.data.media.kind import tag_of
from dflop_jax.data.media.kinds import BUILT_IN, PLACEHOLDERS
from dflop_jax.data.text.tokenizer_files import encoded, load_tokenizer, n_ids

ANSWER_TOKENS = 32  # of its first answer that a cut conversation keeps, or all of a shorter one
TAG = tag_of(BUILT_IN)
BREAK = "\ufdd2"  # inside what spells a tag or a special token and is text; encoding leaves it out
BYTES = "bytes"  # the tokenizer that needs no file
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
# what the template needs of a tokenizer.json, and the names it may have there
SPECIAL_TOKENS = {
    "im_start_id": ("<|im_start|>",),
    "im_end_id": ("<|im_end|>",),
    "placeholder_id": PLACEHOLDERS,
    "pad_id": ("<|endoftext|>", "<pad>", "<|pad|>", "[PAD]"),
}


class Tokenizer(Protocol):
    """Text to token ids and back. `placeholder_id` stands where media are."""

    vocab_size: int
    pad_id: int
    im_start_id: int
    im_end_id: int
    placeholder_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; text that spells a special token is still plain text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens left out."""
        ...

    def spelled(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens by their names."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0-255, then four special ids."""

    pad_id, im_start_id, im_end_id, placeholder_id = 256, 257, 258, 259
    vocab_size = 260

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def spelled(self, ids: Iterable[int]) -> str:
        names = {self.pad_id: b"<|pad|>", self.im_start_id: b"<|im_start|>",
                 self.im_end_id: b"<|im_end|>", self.placeholder_id: b"<|media|>"}  # fmt: skip
        return b"".join(names.get(i) or bytes([i]) for i in ids).decode("utf-8", "replace")


class FileTokenizer:
    """A Hugging Face tokenizer.json with ChatML tokens and a token that stands for media.

    Raises:
      ValueError: no such file, not a tokenizer, or a special token that the template needs is
        missing.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such tokenizer.json; leave it empty for byte-level")
        self._tokenizer = load_tokenizer(path)
        ids = {}
        for name, names in SPECIAL_TOKENS.items():
            known = (self._tokenizer.token_to_id(n) for n in names)
            ids[name] = next((i for i in known if i is not None), -1)
            if ids[name] < 0:
                raise ValueError(
                    f"{path}: lacks {' or '.join(names)}; add it to added_tokens as a special one"
                )
        self.im_start_id, self.im_end_id = ids["im_start_id"], ids["im_end_id"]
        self.placeholder_id, self.pad_id = ids["placeholder_id"], ids["pad_id"]
        self.vocab_size = n_ids(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return encoded(self._tokenizer, text).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def spelled(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def make_tokenizer(path: str = "", vocab_size: int | None = None) -> Tokenizer:
    """Byte-level for an empty path or "bytes"; ValueError when the model's `vocab_size` is too
    small."""
    tokenizer: Tokenizer = ByteTokenizer() if path in ("", BYTES) else FileTokenizer(path)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{path or 'the byte tokenizer'} has {tokenizer.vocab_size} ids, the model's "
            f"vocabulary {vocab_size}; take a model with a larger vocabulary"
        )
    return tokenizer


@dataclass(frozen=True)
class TextPiece:
    """A run of text tokens, or (medium >= 0) the place of a medium's tokens. `weight` is that of
    each token's loss, where they are supervised."""

    ids: tuple[int, ...] = ()
    supervised: bool = False
    medium: int = -1
    weight: float = 1.0


def chat_pieces(
    turns: Sequence[tuple[str, str]], tokenizer: Tokenizer, tag: re.Pattern[str] = TAG
) -> tuple[TextPiece, ...]:
    """ChatML of (role, text) turns; answers and their end-of-turn token are supervised.

    Roles are human, gpt and system. The k-th match of `tag` (see `kind.tag_of`) becomes medium k.
    """
    pieces: list[TextPiece] = []
    n_media = 0
    newline = tuple(tokenizer.encode("\n"))
    for t, (role, text) in enumerate(turns):
        answer = role == "gpt"
        head = (tokenizer.im_start_id, *tokenizer.encode(ROLES[role] + "\n"))
        pieces.append(TextPiece((newline if t else ()) + head))
        for k, part in enumerate(tag.split(text)[::2]):
            if k:
                pieces.append(TextPiece(medium=n_media))
                n_media += 1
            if part:
                pieces.append(TextPiece(tuple(tokenizer.encode(part.replace(BREAK, ""))), answer))
        pieces.append(TextPiece((tokenizer.im_end_id,), answer))
    return tuple(pieces)


def as_text(text: str, kinds: Iterable[str]) -> str:
    """The text with the tags of these kinds as plain text, which stand for no media."""
    for kind in kinds:
        text = text.replace(f"<{kind}>", f"<{BREAK}{kind}>")
    return text


def text_counts(pieces: Sequence[TextPiece]) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Return what an index holds of a conversation and of the place of each medium, in their order.

    `text_tokens` are all of the text; `needed_tokens` those up to ANSWER_TOKENS of the first answer
    or its end, which a cut conversation keeps; `tokens_before` a medium those of the text and the
    media, each of them one.
    """
    first = next((k for k, p in enumerate(pieces) if p.supervised), len(pieces))
    answer = takewhile(lambda p: p.supervised or p.medium >= 0, pieces[first:])
    needed = sum(len(p.ids) for p in pieces[:first])
    needed += min(sum(len(p.ids) for p in answer), ANSWER_TOKENS)
    starts = accumulate((len(p.ids) + (p.medium >= 0) for p in pieces), initial=0)
    places = sorted((p.medium, n) for p, n in zip(pieces, starts) if p.medium >= 0)
    text = {"text_tokens": sum(len(p.ids) for p in pieces), "needed_tokens": needed}
    return text, [{"tokens_before": n} for _, n in places]


def first_tokens(pieces: Iterable[TextPiece], n: int) -> list[TextPiece]:
    """Return the first n tokens of a conversation, each medium being one."""
    first = []
    for p in pieces:
        if n > 0:
            first.append(replace(p, ids=p.ids[:n]))
        n -= len(p.ids) + (p.medium >= 0)
    return first
