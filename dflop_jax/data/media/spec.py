"""What a model asks of media, as it declares it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dflop_jax.data.media import anyres, fitted, internvl_tiles, mel, native, tiles
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Form, Preparation
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import Tokenizer

# The forms of published models: LLaVA-OneVision's is "anyres", InternVL's "dynamic", Qwen3-VL's
# "native", Gemma 3's "square", Gemma 4's "fitted", Qwen2-Audio's "mel".
FORMS = {
    "tiles": tiles.FORM,
    "anyres": anyres.FORM,
    "dynamic": internvl_tiles.FORM,
    "native": native.FORM,
    "square": tiles.SQUARE,
    "fitted": fitted.FORM,
    "mel": mel.FORM,
}
DEFAULT_FORMS = {"vision": "tiles", "audio": "mel"}  # of modules that name none


@dataclass(frozen=True)
class MediaSpec:
    """Every module that takes media with its form and that form's facts.

    `media[module]` is what `MultimodalModel.preprocessing` says: "form", a name of `FORMS` or
    MODULE:NAME of a `Form` that anybody wrote; "piece_tokens", tokens of a piece inside its
    encoder, if these are others than the features that come out; all else is the form's own.

    Raises:
      ValueError: a form that is not known.
    """

    media: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for facts in self.media.values():
            resolve_form(facts["form"])

    @classmethod
    def of(
        cls, preprocessing: Mapping[str, Mapping[str, Any]], piece_tokens: Mapping[str, int]
    ) -> MediaSpec:
        """Return what a model says of its modules; what has no form are no media of records."""
        media = {}
        for module, facts in preprocessing.items():
            if "form" in facts or module in DEFAULT_FORMS:
                encoder_facts = (
                    {"piece_tokens": int(piece_tokens[module])} if module in piece_tokens else {}
                )
                media[module] = {"form": DEFAULT_FORMS.get(module), **facts, **encoder_facts}
        return cls(media)

    @property
    def kinds(self) -> Kinds:
        """The kinds of all media that records may hold: the built-in ones, then the model's own."""
        kinds = dict.fromkeys(BUILT_IN)
        for facts in self.media.values():
            kinds |= dict.fromkeys(resolve_form(facts["form"]).kinds)
        return tuple(kinds)

    def prepared(
        self, limits: Limits, tokenizer: Tokenizer | ChatTokenizer | None = None
    ) -> Preparation:
        """Return how the model takes media under the limits, by module; without a tokenizer, no
        text stands among frames.

        Raises:
          ValueError: facts that its form cannot take.
        """
        preparation = {}
        for module, facts in self.media.items():
            settings = {name: value for name, value in facts.items() if name != "form"}
            try:
                preparation[module] = resolve_form(facts["form"]).build(settings, limits, tokenizer)
            except TypeError as e:  # of a form that knows no such fact
                raise ValueError(f"media of {module!r}: {e}") from None
        return preparation


@cache
def resolve_form(name: str) -> Form:
    """Return the form of a name. ValueError: there is none."""
    if name in FORMS:
        return FORMS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"form {name!r} is not {', '.join(FORMS)}, or MODULE:NAME of a Form")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"form {name!r}: {e}; give MODULE:NAME, importable from here") from None
