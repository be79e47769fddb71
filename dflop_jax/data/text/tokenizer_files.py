"""What stands beside a tokenizer.json: named special tokens, the chat template, the right size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from dflop_jax.data.bounds import MAX_TOKENIZER_BYTES, named, parse_json, read_bounded

SPARE_ROWS = 1024  # embeddings are padded to round sizes, by so many rows or 1/64 of them


def load_tokenizer(file: str | Path) -> tokenizers.Tokenizer:
    """A tokenizer.json that exists, for whole texts whose special tokens are plain text.

    ValueError when it is something else.
    """
    with named(f"{file}: not a tokenizer.json", "; name one, or the model's folder"):
        tokenizer = tokenizers.Tokenizer.from_buffer(read_bounded(Path(file), MAX_TOKENIZER_BYTES))
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            raise ValueError("it has no tokens")
    return tokenizer


def encoded(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """A text's tokens; ValueError where the tokenizer fails on it."""
    with named("the tokenizer fails"):
        return tokenizer.encode(text, add_special_tokens=False)


def n_ids(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than its largest id."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def check_embedding(vocab_size: int, embedding_size: int, name: str) -> None:
    """ValueError unless a tokenizer of `vocab_size` ids fits an embedding of so many rows."""
    spare = max(SPARE_ROWS, embedding_size // 64)
    if vocab_size > embedding_size or vocab_size + spare < embedding_size:
        raise ValueError(
            f"{name}: the tokenizer has {vocab_size} ids, the model's embedding {embedding_size} "
            "rows; take the tokenizer of this model"
        )


def read_json(file: Path) -> dict[str, Any]:
    """The object of a JSON file, empty without one. ValueError when it is something else."""
    if not file.is_file():
        return {}
    data = read_bounded(file, MAX_TOKENIZER_BYTES)
    try:
        return parse_json(data, dict[str, Any])
    except ValueError as e:
        raise ValueError(f"{file}: not a JSON object ({e})") from None


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens that a tokenizer_config.json gives."""
    extra = config.get("extra_special_tokens")
    everything = {**config, **extra} if isinstance(extra, dict) else config
    tokens = {}
    for name, value in everything.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str) and text:
            tokens[name] = text
    return tokens


def listed_tokens(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(field, text) of the special tokens that a tokenizer_config.json gives no names."""
    tokens = []
    for field in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(field)
        for value in listed if isinstance(listed, list) else []:
            text = value.get("content") if isinstance(value, dict) else value
            tokens += [(field, text)] if isinstance(text, str) else []
    return tokens


def template_source(folder: Path, config: Mapping[str, Any]) -> str:
    """The chat template of a folder: chat_template.jinja, or else chat_template.json (the
    processor's), or else the tokenizer's configuration.

    ValueError when there is none.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        with named(f"{file}: not a template"):
            return read_bounded(file, MAX_TOKENIZER_BYTES).decode("utf-8")
    processors = read_json(folder / "chat_template.json")
    template = processors.get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{folder}: no chat template; put the model's chat_template.jinja beside tokenizer.json"
        )
    return template
