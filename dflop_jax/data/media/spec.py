"""The media preparation that a model declares for its modules."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dflop_jax.config import DataConfig
from dflop_jax.data.media import anyres, fitted, mel, native, tiles
from dflop_jax.data.media.kind import BUILT_IN, Kinds
from dflop_jax.data.media.medium import Form, Preparation
from dflop_jax.data.text.chat import AnyTokenizer

FORMS = {
    "tiles": tiles.FORM,
    "anyres": anyres.FORM,  # LLaVA-OneVision
    "dynamic": tiles.DYNAMIC,  # InternVL
    "native": native.FORM,  # Qwen3-VL
    "square": tiles.SQUARE,  # Gemma 3
    "fitted": fitted.FORM,  # Gemma 4
    "mel": mel.FORM,  # Qwen2-Audio
}
DEFAULT_FORMS = {"vision": "tiles", "audio": "mel"}  # for modules without "form"


@dataclass(frozen=True)
class MediaSpec:
    """The form of every module that takes media, and the facts for that form.

    `media[module]` is that of `MultimodalModel.preprocessing`: "form", a name in `FORMS` or the
    MODULE:NAME of a `Form`; "piece_tokens", tokens of a piece inside the encoder if they are not as
    many as its output features; all other facts are the form's. ValueError: an unknown form.
    """

    media: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for facts in self.media.values():
            resolve_form(facts["form"])

    @classmethod
    def of(
        cls, preprocessing: Mapping[str, Mapping[str, Any]], piece_tokens: Mapping[str, int]
    ) -> MediaSpec:
        """Return a model's spec. Modules without a form take no media of records."""
        media = {}
        for module, facts in preprocessing.items():
            if "form" in facts or module in DEFAULT_FORMS:
                media[module] = {"form": DEFAULT_FORMS.get(module), **facts}
                if module in piece_tokens:
                    media[module]["piece_tokens"] = int(piece_tokens[module])
        return cls(media)

    @property
    def kinds(self) -> Kinds:
        """Kinds of media that records may have: the built-in ones, then the model's own."""
        forms = [resolve_form(facts["form"]) for facts in self.media.values()]
        return tuple(dict.fromkeys([*BUILT_IN, *(kind for form in forms for kind in form.kinds)]))

    def prepared(self, limits: DataConfig, tokenizer: AnyTokenizer | None = None) -> Preparation:
        """Return the medium of each module under the limits; without a tokenizer there is no text
        between frames. ValueError: facts that the form does not accept."""
        preparation = {}
        for module, facts in self.media.items():
            settings = {name: value for name, value in facts.items() if name != "form"}
            try:
                preparation[module] = resolve_form(facts["form"]).build(settings, limits, tokenizer)
            except TypeError as e:  # the form has no such argument
                raise ValueError(f"media of {module!r}: {e}") from None
        return preparation


@cache
def resolve_form(name: str) -> Form:
    """Return the form of this name. ValueError: it does not exist."""
    if name in FORMS:
        return FORMS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"form {name!r} is not {', '.join(FORMS)}, or MODULE:NAME of a Form")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"form {name!r}: {e}; give MODULE:NAME, importable from here") from None
