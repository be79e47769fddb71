"""Protocols that map a model's parameters to the tensors of a checkpoint folder.

A model has a `WeightMap` as `model.weights`; `models/hf_tensors.py` implements the protocols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Reshaping(Protocol):
    """Makes a parameter from a file: `array.reshape(split).transpose(order).reshape(shape)`"""

    splits: tuple[tuple[int, ...], ...]  # `split` for each dim of the file's array, () for size 1
    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    file_shape: tuple[int, ...]


class Tensor(Protocol):
    """A parameter, or one layer of a stacked one, and the checkpoint tensor that contains it."""

    name: str
    module: str
    part: str
    path: tuple[str, ...]
    layer: int | None  # index in the stacked part; None if the part is not stacked
    layout: Reshaping
    offset: int  # first row in the tensor's first dim; a tensor may stack several parameters
    float32: bool  # written in float32 even if another dtype is requested


class Unused(Protocol):
    """A tensor that transformers expects and the model does not have."""

    name: str
    shape: tuple[int, ...]
    value: float


class WeightMap(Protocol):
    """The tensors and config.json of a model's checkpoint folder."""

    tensors: Sequence[Tensor]
    unused: Sequence[Unused]
    config: Mapping[str, Any]  # config.json for a folder that is written without a source
    copies: Mapping[str, str]  # ignored tensor -> the tensor that it repeats; it is not written
    stem: str  # prefix of the names of tensor files

    def canonical(self, name: str) -> str:
        """Return the name that `tensors` uses for a name found in a file."""

    def module_name(self, name: str) -> str:
        """Return a tensor's parameter name in a model that transformers has loaded."""

    def is_ignored(self, name: str) -> bool:
        """Return whether the model does not use the tensor with this canonical name."""

    def mismatches(self, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return (key, value in `config`, value in the model) for every key that differs."""


def group_by_name(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Return the parameters in each checkpoint tensor, by its name, ordered by row."""
    named: dict[str, list[Tensor]] = {}
    for t in sorted(tensors, key=lambda t: t.offset):
        named.setdefault(t.name, []).append(t)
    return named


def joined_shape(parts: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of a checkpoint tensor that stacks these parameters by rows."""
    shapes = [t.layout.file_shape for t in parts]
    return shapes[0] if len(parts) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
