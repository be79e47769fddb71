"""Frozen matrices in 8 bits: W is about Q s, Q int8 [*in, *out] and s float32 [*out], a scale for
every output.

The largest of an output's values is 127 or -127, so that a value is off by at most half its scale.
Vectors, embeddings and heads stay as they are: they are small, or looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from models.layers import KERNEL, SCALE
from models.lora import Each, Matrix, called, matrices

Array = jax.Array
Tree = Any
LARGEST = 127.0  # of an int8 whose negative is one too


def rounded(kernel: Array, n_in: int) -> tuple[Array, Array]:
    """(Q, s) of a kernel whose first `n_in` dims are its input's."""
    x = kernel.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=tuple(range(n_in))) / LARGEST
    divisor = jnp.where(scale > 0, scale, jnp.float32(1)).reshape((1,) * n_in + scale.shape)
    return jnp.round(x / divisor).astype(jnp.int8), scale


@partial(jax.jit, static_argnames="n_out")
def restored(codes: Array, scale: Array, n_out: int) -> Array:
    """Q s in float32, of a kernel, or a stack of such, whose last `n_out` dims are outputs."""
    n_in, lead = codes.ndim - scale.ndim, scale.ndim - n_out
    shape = (*scale.shape[:lead], *(1,) * n_in, *scale.shape[lead:])
    return codes.astype(jnp.float32) * scale.reshape(shape)


def quantized(modules: Mapping[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """Modules of a model, those with matrices in some freeze groups holding them in 8 bits."""
    held = {name: QuantizedModule(module, tuple(groups)) for name, module in modules.items()}
    return {name: h if h.matrices else modules[name] for name, h in held.items()}


@dataclass(frozen=True)
class QuantizedModule:
    """A module of the contract that holds the matrices of some freeze groups in 8 bits. Its
    functions also take them as floats, without scales."""

    module: Any
    groups: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def on_chip(self, chip: str) -> QuantizedModule:
        """See `dflop_jax.contract.on_chip`."""
        return replace(self, module=self.module.on_chip(chip))

    @property
    def unquantized(self) -> Any:
        """See `dflop_jax.contract`."""
        return self.module

    @cached_property
    def matrices(self) -> dict[str, tuple[Matrix, ...]]:
        """By part those that it holds in 8 bits."""
        groups = self.module.freeze_groups.items()
        every = {part: matrices(self.module, part) for part, g in groups if g in self.groups}
        return {part: found for part, found in every.items() if found}

    @cached_property
    def float32_names(self) -> frozenset[str]:
        """See `dflop_jax.contract`."""
        return frozenset(getattr(self.module, "float32_names", ())) | {SCALE}

    def init(self, part: str, key: Array) -> Tree:
        return self._changed(part, self.module.init(part, key), _rounded)

    def logical_axes(self, part: str) -> Tree:
        return self._changed(part, self.module.logical_axes(part), _with_axes)

    def merged(self, params: Mapping[str, Tree], each: Each = called) -> dict[str, Tree]:
        """Parameters as the plain module has them, what is held in 8 bits in float32; see
        `models.lora.AdaptedModule.merged`."""
        restore = partial(_restored, each=each)
        return {part: self._changed(part, tree, restore) for part, tree in params.items()}

    def _changed(self, part: str, tree: Tree, change: Callable[[Any, Matrix], Any]) -> Tree:
        """A part's tree with what it has of each of its matrices changed."""
        for m in self.matrices.get(part, ()):
            tree = _at(tree, m.name.split("."), m, change)
        return tree


def _at(tree: Tree, path: list[str], m: Matrix, change: Callable[[Any, Matrix], Any]) -> Tree:
    if not path:
        return change(tree, m)
    return {**tree, path[0]: _at(tree[path[0]], path[1:], m, change)}


def _rounded(own: Mapping[str, Array], m: Matrix) -> dict[str, Array]:
    codes, scale = rounded(own[KERNEL], len(m.in_shape))
    return {**own, KERNEL: codes, SCALE: scale}


def _with_axes(own: Mapping[str, Any], m: Matrix) -> dict[str, Any]:
    return {**own, SCALE: m.out_names}


def _restored(own: Mapping[str, Array], m: Matrix, each: Each) -> dict[str, Array]:
    if SCALE not in own:
        return {**own}
    plain = {name: array for name, array in own.items() if name != SCALE}
    restore = partial(restored, n_out=len(m.out_shape))
    return {**plain, KERNEL: each(restore, own[KERNEL], own[SCALE])}
