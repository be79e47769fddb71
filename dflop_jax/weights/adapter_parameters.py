"""A folder of adapters, as `peft` writes it, as adapters of a model that goes on training them.

What a tensor's adapter adds is kept as it is, whatever wrote the folder. Where several matrices are
one tensor, one below the other, each gets an adapter of its own: of its own ranks where the folder
tells them apart, as one that `write_adapter` wrote does, else of all of the tensor's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop_jax.contract import Module, adapter_of, n_rows, stacked_parts
from dflop_jax.weights.adapter import CONFIG
from dflop_jax.weights.adapter_read import (
    Pair,
    module_of,
    read_adapter_config,
    read_pairs,
    scale_of,
    two_sides,
)
from dflop_jax.weights.contract import Tensor, WeightMap, by_name


@dataclass(frozen=True)
class FolderAdapters:
    """The adapters of a folder.

    Attributes:
      rank, alpha, dropout: as in `AdapterForm`.
      ranks: of every adapted matrix, GROUP.MATRIX, of which some may have other ones than `rank`.
      arrays: "MODULE/PART/MATRIX/a" [*in, rank] and ".../b" [rank, *out], in parts of layers one of
        each layer, [layers, ...]; float32, dims of the inputs or outputs perhaps joined.
    """

    rank: int
    alpha: float
    dropout: float
    ranks: Mapping[str, int]
    arrays: Mapping[str, np.ndarray]


def read_adapters(
    path: str | Path, map_: WeightMap, modules: Mapping[str, Module]
) -> FolderAdapters:
    """The adapters of a folder, as those of the modules of a model without.

    Args:
      map_: which parameter is which tensor of the model that is adapted.

    Raises:
      ValueError: there are no such adapters, they adapt another model, or some layers of a matrix
        alone, or not all are scaled alike.
    """
    folder = Path(path)
    config, pairs = read_adapter_config(folder), read_pairs(folder, map_)
    alpha, rank = float(config.get("lora_alpha", 8)), int(config.get("r", 8))
    for name, pair in pairs.items():
        if not np.isclose(scale_of(config, name, pair) * len(pair["A"]), alpha):
            raise ValueError(
                f"{folder / CONFIG}: alpha_pattern gives {name} an alpha of its own, which cannot "
                "be trained on; merge it into its model by peft (merge_and_unload)"
            )
    ranks: dict[str, int] = {}
    arrays: dict[str, np.ndarray] = {}
    for fused in _fused(map_, pairs):
        for key, layers in _of_parameters(folder, map_, pairs, fused).items():
            module, part, matrix = key
            wanted = n_rows(modules[module], part) if part in stacked_parts(modules[module]) else 1
            if len(layers) < wanted:
                raise ValueError(
                    f"{folder}: adapts {matrix} of {module} in {len(layers)} of {wanted} layers, "
                    "and all or none can be trained on; merge it into its model by peft "
                    "(merge_and_unload)"
                )
            where = f"{module}/{adapter_of(part)}/{matrix}"
            for side, values in zip("ab", zip(*layers, strict=True), strict=True):
                is_stacked = part in stacked_parts(modules[module])
                arrays[f"{where}/{side}"] = np.stack(values) if is_stacked else values[0]
            ranks[f"{modules[module].freeze_groups[part]}.{matrix}"] = layers[0][0].shape[-1]
    dropout = float(config.get("lora_dropout") or 0)
    return FolderAdapters(rank, alpha, dropout, ranks, arrays)


def _fused(map_: WeightMap, pairs: Mapping[str, Pair]) -> Iterator[list[list[Tensor]]]:
    """The adapted tensors by layer, of each its parameters; one after the other those of the same
    parameters."""
    same: dict[tuple[tuple[str, ...], ...], list[list[Tensor]]] = {}
    for name, parts in by_name(map_.tensors).items():
        if name.endswith(".weight") and module_of(map_, parts[0]) in pairs:
            key = tuple((t.module, t.part, *t.path) for t in parts)
            same.setdefault(key, []).append(parts)
    for tensors in same.values():
        yield sorted(tensors, key=lambda parts: parts[0].layer or 0)


def _of_parameters(
    folder: Path, map_: WeightMap, pairs: Mapping[str, Pair], fused: Sequence[Sequence[Tensor]]
) -> dict[tuple[str, str, str], list[tuple[np.ndarray, np.ndarray]]]:
    """(a, b) by layer of each matrix (module, part, name) that is adapted, of the layers of some
    tensors."""
    names = [module_of(map_, parts[0]) for parts in fused]
    sides = [two_sides(folder, name, pairs[name]) for name in names]
    for (a, b), name, parts in zip(sides, names, fused, strict=True):
        if any(t.path[-1] != "kernel" for t in parts):
            raise ValueError(
                f"{folder}: adapts {name}, which cannot be trained on; merge it into its model by "
                "peft (merge_and_unload)"
            )
        n_last, *others = parts[-1].layout.file_shape
        wanted = (parts[-1].offset + n_last, *others)
        if (len(b), *a.shape[1:]) != wanted or len(a) != len(sides[0][0]):
            raise ValueError(
                f"{folder}: adapts {name} of {[len(b), *a.shape[1:]]} by rank {len(a)}, which has "
                f"{list(wanted)} here, rank {len(sides[0][0])} in its first layer; give its model"
            )
    found: dict[tuple[str, str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for i, columns in enumerate(_columns(fused[0], [b for _, b in sides])):
        for parts, (a, b) in zip(fused, sides, strict=True):
            t = parts[i]
            if not len(columns):
                continue
            rows = slice(t.offset, t.offset + t.layout.file_shape[0])
            share = len(columns) / len(a)
            key = t.module, t.part, ".".join(t.path[:-1])
            found.setdefault(key, []).append(
                as_parameters(t, a[columns], share * b[rows][:, columns])
            )
    return found


def _columns(parts: Sequence[Tensor], bs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of each parameter of a tensor, which columns of B its adapter has: those that act on it,
    where each acts on one alone and they stand in their order; else all.

    Args:
      bs: B [rows, rank] of all layers.
    """
    every = np.arange(bs[0].shape[1])
    if len(parts) == 1:
        return [every]
    rows = [slice(t.offset, t.offset + t.layout.file_shape[0]) for t in parts]
    acts = np.array([np.any([b[r] for b in bs], axis=(0, 1)) for r in rows])  # [parameters, rank]
    owner = np.argmax(acts, axis=0)
    if (acts.sum(axis=0) == 1).all() and (np.diff(owner) >= 0).all():
        return [every[owner == i] for i in range(len(parts))]
    return [every] * len(parts)


def as_parameters(t: Tensor, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a [*in, rank] and b [rank, *out] of A [rank, *in] and B [out, rank] as in a file: what
    `as_matrices` undoes.

    Args:
      t: the tensor of the kernel [*in, *out] that they adapt, in the file [out, *in].
    """
    layout, rank = t.layout, len(a)
    n_out = len(layout.splits[0])
    inner = [i for i in layout.order if i >= n_out]  # in the parameter's order
    outer = [i for i in layout.order if i < n_out]
    a = a.reshape(rank, *(layout.split[i] for i in sorted(inner)))
    a = a.transpose(*(1 + sorted(inner).index(i) for i in inner), 0)
    b = b.T.reshape(rank, *(layout.split[i] for i in range(n_out)))
    return a, b.transpose(0, *(1 + i for i in outer))
