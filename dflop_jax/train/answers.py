"""What a run is given to have its held-out samples answered; who answers knows of runs, not they of
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dflop_jax.config import Config
from dflop_jax.data import Source
from dflop_jax.train.prepare import Workplace


class Answers(Protocol):
    """Answers to held-out samples; all processes call it together."""

    @property
    def device_bytes(self) -> float:
        """Bytes of a device that it needs beside the run's state."""

    def prepare(self) -> None:
        """Compile all that is needed, after the run's state is in place."""

    def metrics(self, step: int, checkpoint: Path) -> dict[str, float]:
        """How good the answers are by the parameters of a checkpoint, by metric."""


MakeAnswers = Callable[[Config, Workplace, Source], Answers]


def with_room(place: Workplace, answers: Answers | None) -> Workplace:
    """The workplace whose plans leave room for answers."""
    return replace(place, reserved_bytes=answers.device_bytes) if answers else place


def made_answers(
    make: MakeAnswers | None, config: Config, place: Workplace, source: Source | None
) -> Answers | None:
    """What answers where `train.eval_generate_every` asks for it.

    Raises:
      ValueError: nothing can, or what is asked for cannot be.
    """
    if not config.train.eval_generate_every:
        return None
    if make is None:
        raise ValueError(
            f"train.eval_generate_every={config.train.eval_generate_every} needs what answers; "
            "give Trainer answers=dflop_jax.held_out_answers"
        )
    assert source is not None, "checked before: answers are to held-out samples"
    return make(config, place, source)
