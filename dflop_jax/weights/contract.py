"""What reading and writing needs to know of a model: which tensor of a folder is which parameter.

A model gives it as `model.weights`; `models/hf_tensors.py` satisfies these protocols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Reshaping(Protocol):
    """The array of a file as a parameter: `file.reshape(split).transpose(order).reshape(shape)`."""

    @property
    def splits(self) -> tuple[tuple[int, ...], ...]:
        """The dims into which each dim of the file is split (none for a dim of 1)."""
        ...

    @property
    def split(self) -> tuple[int, ...]: ...

    @property
    def order(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def file_shape(self) -> tuple[int, ...]: ...


class Tensor(Protocol):
    """A parameter, or a layer of one, and the tensor of a folder that has it; `layer` is None but
    in stacked parts, where it counts the layers of the part."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> str: ...

    @property
    def part(self) -> str: ...

    @property
    def path(self) -> tuple[str, ...]: ...

    @property
    def layer(self) -> int | None: ...

    @property
    def layout(self) -> Reshaping: ...

    @property
    def offset(self) -> int:
        """Where it begins along the first dim of the tensor: several parameters may be one, one
        after the other."""
        ...

    @property
    def float32(self) -> bool:
        """Whether it is written in float32 where another type is asked for."""
        ...


def group_by_name(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """The parameters that each tensor of a folder has, in their order there."""
    named: dict[str, list[Tensor]] = {}
    for t in tensors:
        named.setdefault(t.name, []).append(t)
    return {name: sorted(parts, key=lambda t: t.offset) for name, parts in named.items()}


def joined_shape(parts: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of a tensor that has these parameters."""
    first, *other_shapes = (t.layout.file_shape for t in parts)
    return (
        (first[0] + sum(shape[0] for shape in other_shapes), *first[1:]) if other_shapes else first
    )


class Unused(Protocol):
    """A tensor that transformers expects and the model does not have."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def value(self) -> float: ...


class WeightMap(Protocol):
    """All of a folder."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    @property
    def unused(self) -> Sequence[Unused]: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The config.json of a folder written without another as its pattern."""
        ...

    @property
    def copies(self) -> Mapping[str, str]:
        """Ignored tensors that repeat another one, and that one; they are not written."""
        ...

    @property
    def stem(self) -> str:
        """How the names of the files with tensors begin."""
        ...

    def canonical(self, name: str) -> str:
        """The name used in `tensors` of a name found in a file."""
        ...

    def module_name(self, name: str) -> str:
        """What transformers calls the parameter of a tensor in a model that it has loaded."""
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether the model has no use for a tensor of this canonical name."""
        ...

    def mismatches(self, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """(key, value of `config`, value of the model) of every key that disagrees."""
        ...
