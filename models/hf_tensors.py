"""Maps the tensors of a Hugging Face folder to the parameters of our modules.

Pure data: a `HfWeightMap` lists every tensor of a checkpoint with its parameter, the dims that are
split, transposed and joined, names with the same meaning, and the tensors that the model does not
use. `dflop_jax/weights/` reads and writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax

from models.hf_config import ConfigComparison


@dataclass(frozen=True)
class HfReshaping:
    """A file's array as a parameter: `file.reshape(split).transpose(order).reshape(shape)`.

    `splits` has, for each dim of the file, the dims that it is split into (none for a dim of 1).
    """

    splits: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert sorted(self.order) == list(range(len(self.split))), self
        assert math.prod(self.shape) == math.prod(self.split), self

    @property
    def split(self) -> tuple[int, ...]:
        """Dims between reading and transposing."""
        return tuple(n for dims in self.splits for n in dims)

    @property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(dims) for dims in self.splits)


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a checkpoint and the parameter that holds its values.

    `path` has the keys of the parameter in its part. `layer` is the number among the part's layers
    if the part is stacked, else None. `float32` tensors are always written in float32. One tensor
    may hold several parameters, concatenated along its first dim: `offset` is where this one
    starts.
    """

    name: str
    module: str
    part: str
    path: tuple[str, ...]
    layer: int | None
    layout: HfReshaping
    float32: bool = False
    offset: int = 0


@dataclass(frozen=True)
class HfUnused:
    """A tensor that the reference has and the model does not use, and its value if unknown."""

    name: str
    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class HfWeightMap:
    """All tensors of a checkpoint to read and write, and its configuration.

    `aliases` are (pattern, replacement) pairs, applied in order to a name in a file; the result is
    the name used here and written by transformers 5. `ignored` has patterns of names that are not
    read. `copies` maps a name that may repeat another tensor to that tensor's name. `unused` are
    the ignored tensors that a written folder must have. `stem` is the start of tensor files' names.
    `loaded_names` are (pattern, replacement) pairs from a name used here to the parameter's name in
    a model that transformers has loaded.
    """

    tensors: tuple[HfTensor, ...]
    config: Mapping[str, Any]
    config_rules: ConfigComparison
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[HfUnused, ...] = ()
    stem: str = "model"
    loaded_names: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """Return the name used here for a name in a file."""
        for pattern, replacement in self.aliases:
            name = re.sub(pattern, replacement, name)
        return name

    def module_name(self, name: str) -> str:
        """Return the parameter's name in a model that transformers 5 has loaded."""
        for pattern, replacement in self.loaded_names:
            name = re.sub(pattern, replacement, name)
        return name

    def is_ignored(self, name: str) -> bool:
        """Return whether the model does not use the tensor of this canonical name."""
        return name in self.copies or any(re.fullmatch(p, name) for p in self.ignored)

    def mismatches(self, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return (key, value in the file, value of the model) of every key that disagrees."""
        return self.config_rules.mismatches(config, self.config)


# ---- layouts ----


def linear_layout(shape: Sequence[int], n_in: int = 1) -> HfReshaping:
    """Return the layout of a kernel [*in, *out], in the file [out, in]."""
    inner, outer = tuple(shape[:n_in]), tuple(shape[n_in:])
    n = len(outer)
    order = (*range(n, n + n_in), *range(n))
    return HfReshaping((outer, inner), order, tuple(shape))


def vector_layout(shape: Sequence[int]) -> HfReshaping:
    """Return the layout of a parameter of any shape, in the file a vector."""
    return HfReshaping((tuple(shape),), tuple(range(len(shape))), tuple(shape))


def unchanged(shape: Sequence[int], leading: int = 0) -> HfReshaping:
    """Return the file's layout, which may have `leading` dims of 1."""
    return HfReshaping(
        (*((),) * leading, *((n,) for n in shape)), tuple(range(len(shape))), tuple(shape)
    )


def patch_layout(shape: Sequence[int], patch_px: int) -> HfReshaping:
    """Return a kernel [row x column x colour, width], stored as [width, colour, row, column]."""
    _, width = shape
    return HfReshaping(((width,), (3,), (patch_px,), (patch_px,)), (2, 3, 1, 0), tuple(shape))


def clip_patch_layout(shape: Sequence[int], patch_px: int, frames: int) -> HfReshaping:
    """Return the layout of a kernel [colour x frame x row x column, width], in the file a
    convolution [width, colour, frame, row, column]."""
    _, width = shape
    dims = ((width,), (3,), (frames,), (patch_px,), (patch_px,))
    return HfReshaping(dims, (1, 2, 3, 4, 0), tuple(shape))


def patch_matrix_layout(shape: Sequence[int], patch_px: int) -> HfReshaping:
    """Return a kernel [colour x row x column, width], stored as [width, row x column x colour]."""
    _, width = shape
    return HfReshaping(((width,), (patch_px, patch_px, 3)), (3, 1, 2, 0), tuple(shape))


def conv_layout(shape: Sequence[int]) -> HfReshaping:
    """Return the layout of a kernel [step, in, out], in the file a convolution [out, in, step]."""
    steps, inner, outer = shape
    return HfReshaping(((outer,), (inner,), (steps,)), (2, 1, 0), tuple(shape))


def channel_conv_layout(shape: Sequence[int]) -> HfReshaping:
    """Return taps [step, *channels], stored as a convolution [channels, 1, step]."""
    steps, *channels = shape
    n = len(channels)
    return HfReshaping((tuple(channels), (), (steps,)), (n, *range(n)), tuple(shape))


# ---- lists of tensors ----


@dataclass(frozen=True)
class Rule:
    """A parameter by its path ("query/kernel") and its name in a file; `{}` stands for the layer's
    number in the module. Parameters of equal names are one tensor, in the order of their rules.

    A parameter that a module of this size lacks is skipped.
    """

    part: str
    path: str
    name: str
    layout: str = "vector"


def tensors_of(module: Any, key: str, rules: Sequence[Rule], prefix: str) -> list[HfTensor]:
    """List the tensors of a module of the contract, whose name in its model is `key`."""
    numbers = _layer_numbers(module)  # a kind may have no layer in this size
    rules = [rule for rule in rules if rule.part in numbers or rule.part in module.inputs]
    shapes = {part: _parameter_shapes(module, part) for part in {rule.part for rule in rules}}
    tensors, rows = [], dict[str, int]()
    for rule in rules:
        path = tuple(rule.path.split("/"))
        shape = shapes[rule.part].get(path)
        if shape is None:
            continue
        layout = _make_layout(rule.layout, shape, module.size)
        float32 = path[-1] in getattr(module, "float32_names", ())
        for layer, number in enumerate(numbers.get(rule.part, [None])):
            name = prefix + rule.name.format(number)
            index_in_part = None if number is None else layer
            offset = rows.get(name, 0)
            tensors.append(
                HfTensor(name, key, rule.part, path, index_in_part, layout, float32, offset)
            )
            rows[name] = offset + (layout.file_shape or (0,))[0]
    return tensors


def _layer_numbers(module: Any) -> dict[str, list[int | None]]:
    """Return the numbers of layers in the module, by stacked part."""
    kinds = getattr(module, "layer_kinds", ("layers",) * module.n_layers)
    numbers: dict[str, list[int | None]] = {}
    for number, kind in enumerate(kinds):
        numbers.setdefault(kind, []).append(number)
    return numbers


def _make_layout(kind: str, shape: tuple[int, ...], size: Any) -> HfReshaping:
    if kind == "patch":
        return patch_layout(shape, size.patch_px)
    if kind == "patch_matrix":
        return patch_matrix_layout(shape, size.patch_px)
    if kind == "clip_patch":
        return clip_patch_layout(shape, size.patch_px, size.frames)
    return {
        "linear": linear_layout,
        "heads_linear": lambda s: linear_layout(s, 2),
        "vector": vector_layout,
        "same": unchanged,
        "one_leading": lambda s: unchanged(s, 1),
        "two_leading": lambda s: unchanged(s, 2),
        "conv": conv_layout,
        "channel_conv": channel_conv_layout,
    }[kind](shape)


@cache
def _parameter_shapes(module: Any, part: str) -> dict[tuple[str, ...], tuple[int, ...]]:
    specs = jax.eval_shape(lambda key: module.init(part, key), jax.random.key(0))
    leaves = jax.tree_util.tree_flatten_with_path(specs)[0]
    return {tuple(k.key for k in path): leaf.shape for path, leaf in leaves}
