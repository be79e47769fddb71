"""What of a conversation is trained on, and how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflop_jax.data.text.pieces import TextPiece

WEIGHT = "weight"  # the field of a turn, and of a record
SWITCHES = ("loss", "train")  # fields of a turn: off means weight 0
_ON, _OFF = (None, True, "true"), (False, "false")  # 1 equals True, 0 False


def answer_weights(turns: Sequence[Any], roles: Sequence[str], of_all: Any) -> tuple[float, ...]:
    """The weight of every answer of a record: its turn's times the record's own, 1 where none is
    given, 0 where `loss` or `train` of the turn is false, 0 or "false"; () where all are 1.

    Args:
      turns: mappings, of which those of answers may have a weight, or one of `SWITCHES`.
      roles: human, gpt or system, of each.

    Raises:
      ValueError: a weight or switch that is none, or a weight of a turn that is no answer.
    """
    whole = _weight(of_all, "the record")
    weights = []
    for k, (turn, role) in enumerate(zip(turns, roles, strict=True)):
        fields = turn if isinstance(turn, Mapping) else {}
        given, switches = fields.get(WEIGHT), {name: fields.get(name) for name in SWITCHES}
        for name, value in switches.items():
            if value not in _ON + _OFF:
                raise ValueError(f"{name} of turn {k} is {value!r:.50}; give true or false")
        if role == "gpt":
            is_trained = not any(value in _OFF for value in switches.values())
            weights.append(whole * _weight(given, f"turn {k}") * is_trained)
        elif given is not None:
            raise ValueError(f"turn {k} has a weight and is no answer")
    return () if all(w == 1.0 for w in weights) else tuple(weights)


def _weight(given: Any, whose: str) -> float:
    if given is None:
        return 1.0
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not (math.isfinite(given) and given >= 0):
        raise ValueError(f"the weight of {whose} is {given!r:.50}, not a number, 0 or above")
    return float(given)


def trained_on(
    pieces: Sequence[TextPiece], weights: Sequence[float], *, prompts: bool
) -> tuple[TextPiece, ...]:
    """The pieces of a conversation with the weights of its answers (none: 1 each), and all other
    text supervised, too, if `prompts`.

    Raises:
      ValueError: weights where the template does not tell the answers apart.
    """
    out = []
    for p in pieces:
        if weights and p.supervised:
            if p.answer < 0:
                raise ValueError(
                    f"the chat template marks other text than its {len(weights)} answers as "
                    "generated, so these cannot have weights"
                )
            p = replace(p, weight=weights[p.answer])
        elif prompts and p.medium < 0:
            p = replace(p, supervised=True)
        out.append(p)
    return tuple(out)
