"""What reading and writing needs to know of a model: which tensor of a folder is which parameter.

A model gives a `WeightMap` as `model.weights`; those of `models/hf_tensors.py` satisfy it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Reshaping(Protocol):
    """The array of a file as a parameter: `file.reshape(split).transpose(order).reshape(shape)`."""

    splits: tuple[tuple[int, ...], ...]  # `split` by dim of the file, () for a dim of 1
    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    file_shape: tuple[int, ...]


class Tensor(Protocol):
    """A parameter, or a layer of one, and the tensor of a folder that has it."""

    name: str
    module: str
    part: str
    path: tuple[str, ...]
    layer: int | None  # number in its part, if that is stacked
    layout: Reshaping
    offset: int  # along the tensor's first dim: several parameters may be one, one after the other
    float32: bool  # written in float32 whatever type is requested


class Unused(Protocol):
    """A tensor that transformers expects and the model does not have."""

    name: str
    shape: tuple[int, ...]
    value: float


class WeightMap(Protocol):
    """All of a folder."""

    tensors: Sequence[Tensor]
    unused: Sequence[Unused]
    config: Mapping[str, Any]  # config.json of a folder that is written without a source
    copies: Mapping[str, str]  # ignored tensors that repeat another one, which are not written
    stem: str  # how the names of the files with tensors begin

    def canonical(self, name: str) -> str:
        """The name used in `tensors` of a name found in a file."""

    def module_name(self, name: str) -> str:
        """What transformers calls the parameter of a tensor in a model that it has loaded."""

    def is_ignored(self, name: str) -> bool:
        """Whether the model has no use for a tensor of this canonical name."""

    def mismatches(self, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """(key, value of `config`, value of the model) of every key that disagrees."""


def group_by_name(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """The parameters that each tensor of a folder has, in their order there."""
    named: dict[str, list[Tensor]] = {}
    for t in sorted(tensors, key=lambda t: t.offset):
        named.setdefault(t.name, []).append(t)
    return named


def joined_shape(parts: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of a tensor that has these parameters."""
    shapes = [t.layout.file_shape for t in parts]
    return shapes[0] if len(parts) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
