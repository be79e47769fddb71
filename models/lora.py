"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + (alpha / rank) (x A) B with fixed W.

Patterns of names GROUP.MATRIX select the adapted matrices: the freeze group of a matrix's part, and
its name in the part ("llm.query", "vision.up", "connector.hidden"). A module's layers do not know
of adapters: `AdaptedModule` adds them to the output of each adapted `Linear`, and stores A and B of
a part in an additional part, in the freeze group "lora".

In training, `dropout` sets that share of an adapter's input values to zero and scales the others up
(as in arXiv 2106.09685). The mask depends only on a token's number (the field "seeds"), the layer,
the matrix and the index in x, so that it is the same in any plan, in any packing and when it is
recomputed; number 0, as in evaluation, means no dropout.

B is initially zero, so an adapted model starts as its base model; `merged` adds the adapters to the
weights permanently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.dropout import InputDropout
from models.layers import KERNEL, Linear, Names, normal

Array = jax.Array
Tree = Any
Each = Callable[..., Any]  # (function, *arrays) -> the function's result, computed now or on demand
GROUP = "lora"  # the freeze group of adapters
LAYERS = "layers"  # the part of a module whose layers are of one kind
SEEDS, LAYER = "seeds", "layer"  # fields: tokens' numbers, and the layer's number


@dataclass(frozen=True)
class Lora:
    """The matrices to adapt, and rank and scale of their adapters.

    Attributes:
      rank: of the adapters that `ranks` does not name.
      alpha: the output of an adapter is scaled by alpha / rank.
      targets: shell patterns of the matrices to adapt; a pattern without a dot means all matrices
        of the groups that it matches.
      ranks: (pattern, rank) for some matrices; the last match counts.
      dropout: share of an adapter's input values that are dropped in training.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("llm",)
    ranks: tuple[tuple[str, int], ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        ranks = (self.rank, *(rank for _, rank in self.ranks))
        if min(ranks) < 1 or not 0 < self.alpha < float("inf"):
            raise ValueError(f"LoRA needs a rank of at least 1 and an alpha above 0, got {self}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA's dropout {self.dropout} must be at least 0 and below 1")

    def rank_of(self, name: str) -> int:
        """Return the rank of a matrix's adapter; 0 if the matrix is not adapted."""
        if not any(_matches(name, pattern) for pattern in self.targets):
            return 0
        ranks = [rank for pattern, rank in self.ranks if _matches(name, pattern)]
        return ranks[-1] if ranks else self.rank


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern if "." in pattern else f"{pattern}.*")


def adapter_part(part: str) -> str:
    """Return the name of the part that holds a part's adapters."""
    return "adapter" if part == LAYERS else f"{part}_adapter"


# ---- the matrices of a module ----


@dataclass(frozen=True)
class Matrix:
    """A `Linear` of a part, by its name there, and the shapes and logical axes of its two sides."""

    name: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    in_names: Names
    out_names: Names


@lru_cache(maxsize=256)
def linear_matrices(module: Any, part: str) -> tuple[Matrix, ...]:
    """Return a part's matrices that are a `Linear`; of one layer if the part is stacked."""
    by_name: dict[str, Matrix] = {}

    def record_linear(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        linear = context.module
        if isinstance(linear, Linear):
            sides = linear.in_shape, linear.out_shape, linear.in_names, linear.out_names
            by_name[_matrix_name(linear)] = Matrix(_matrix_name(linear), *sides)
        return next_call(*args, **kwargs)

    with nn.intercept_methods(record_linear):
        jax.eval_shape(lambda key: module.init(part, key), jax.random.key(0))
    return tuple(by_name.values())


def _matrix_name(linear: nn.Module) -> str:
    return ".".join(linear.path)


def matrix_names(modules: Mapping[str, Any]) -> tuple[str, ...]:
    """Return GROUP.MATRIX of all matrices of some modules that can be adapted."""
    groups = [(m, part, g) for m in modules.values() for part, g in m.freeze_groups.items()]
    return tuple(
        dict.fromkeys(f"{g}.{a.name}" for m, p, g in groups for a in linear_matrices(m, p))
    )


def add_adapters(modules: Mapping[str, Any], lora: Lora | None) -> dict[str, Any]:
    """Return a model's modules, with adapters on those that match.

    Raises:
      ValueError: a pattern matches no matrix, or a rank is given for one that is not adapted.
    """
    return dict(_adapted_items(tuple(modules.items()), lora)) if lora else dict(modules)


@lru_cache(maxsize=64)  # a model's modules are requested often
def _adapted_items(items: tuple[tuple[str, Any], ...], lora: Lora) -> tuple[tuple[str, Any], ...]:
    modules = dict(items)
    names = matrix_names(modules)
    for pattern in lora.targets:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(
                f"train.lora_targets: {pattern!r} matches no matrix of the model; it has "
                f"{', '.join(names)}"
            )
    targets = [name for name in names if lora.rank_of(name)]
    for pattern, _ in lora.ranks:
        if not any(_matches(name, pattern) for name in targets):
            raise ValueError(
                f"train.lora_ranks: {pattern!r} matches no matrix of train.lora_targets; "
                f"those are {', '.join(targets)}"
            )
    adapted_modules = {name: AdaptedModule(module, lora) for name, module in modules.items()}
    return tuple((name, a if a.adapters else modules[name]) for name, a in adapted_modules.items())


# ---- a module with adapters ----


def call_now(function: Callable[..., Any], *arrays: Any) -> Any:
    """Return the function's result, computed now."""
    return function(*arrays)


@dataclass(frozen=True)
class AdaptedModule:
    """A module of the contract with adapters besides its parts."""

    module: Any
    lora: Lora

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def on_chip(self, chip: str) -> AdaptedModule:
        return replace(self, module=self.module.on_chip(chip))

    @cached_property
    def adapters(self) -> Mapping[str, str]:
        """Parts that hold adapters, and the part that each adapts."""
        return {adapter_part(p): p for p in self.module.freeze_groups if self._ranks_by_matrix(p)}

    def _ranks_by_matrix(self, part: str) -> dict[Matrix, int]:
        """Return the adapted matrices of a part, and the ranks of their adapters."""
        group = self.module.freeze_groups[part]
        ranks = {
            m: self.lora.rank_of(f"{group}.{m.name}") for m in linear_matrices(self.module, part)
        }
        return {m: rank for m, rank in ranks.items() if rank}

    @cached_property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        plain = self.module.inputs
        seed_field = (SEEDS,) if self.lora.dropout else ()
        adapter_inputs = {
            adapter: (*plain[part], *seed_field) for adapter, part in self.adapters.items()
        }
        return {**plain, **adapter_inputs}

    @property
    def numbers_layers(self) -> bool:
        return self.lora.dropout > 0

    def field_spec(self, name: str, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
        if name != SEEDS:
            return self.module.field_spec(name, rows, tokens)
        packs = any("segment_ids" in names for names in self.module.inputs.values())
        return jax.ShapeDtypeStruct((rows, tokens) if packs else (rows,), jnp.uint32)

    @cached_property
    def freeze_groups(self) -> Mapping[str, str]:
        return {**self.module.freeze_groups, **dict.fromkeys(self.adapters, GROUP)}

    def init(self, part: str, key: Array) -> Tree:
        if part not in self.adapters:
            return self.module.init(part, key)
        adapters = {}
        for i, (m, rank) in enumerate(self._ranks_by_matrix(self.adapters[part]).items()):
            shape = (*m.in_shape, rank)
            a = normal(prod(m.in_shape) ** -0.5)(jax.random.fold_in(key, i), shape, jnp.float32)
            adapters[m.name] = {"a": a, "b": jnp.zeros((rank, *m.out_shape), jnp.float32)}
        return adapters

    def logical_axes(self, part: str) -> Tree:
        if part not in self.adapters:
            return self.module.logical_axes(part)
        targets = self._ranks_by_matrix(self.adapters[part])
        return {m.name: {"a": (*m.in_names, None), "b": (None, *m.out_names)} for m in targets}

    def _run_adapted(
        self, part: str, batch: Mapping[str, Array], params: Tree, run: Callable[..., Any]
    ) -> Any:
        """Run a function of a part's parameters while the part is adapted."""
        if not isinstance(params, Mapping) or "adapter" not in params:
            return run(params)
        plain = {name: tree for name, tree in params.items() if name != "adapter"}
        input_dropout = InputDropout(self.lora.dropout, part, batch[SEEDS], batch.get(LAYER)) if (
            self.lora.dropout and SEEDS in batch) else None  # fmt: skip
        adding = partial(_add_adapter, self.lora.alpha, params["adapter"], input_dropout)
        with nn.intercept_methods(adding):
            return run(plain)

    def entry(self, params: Tree, batch: Mapping[str, Array]) -> Array:
        return self._run_adapted("entry", batch, params, lambda p: self.module.entry(p, batch))

    def layer(
        self, params: Tree, x: Array, batch: Mapping[str, Array], *args: Any, **kwargs: Any
    ) -> Array:
        kind = kwargs.get("kind", LAYERS)
        return self._run_adapted(
            kind, batch, params, lambda p: self.module.layer(p, x, batch, *args, **kwargs)
        )

    def exit(self, params: Tree, x: Array, batch: Mapping[str, Array], entry: Tree = None) -> Any:
        return self._run_adapted(
            "exit", batch, params, lambda p: self.module.exit(p, x, batch, entry)
        )

    def tap(self, name: str, params: Tree, x: Array, batch: Mapping[str, Array]) -> Array:
        return self._run_adapted(name, batch, params, lambda p: self.module.tap(name, p, x, batch))

    def merged(self, params: Mapping[str, Tree], each: Each = call_now) -> dict[str, Tree]:
        """Return parameters of the plain module that computes the same as the adapted one.

        Args:
          params: parts of the module or of a segment of it, layers stacked, on the host or on
            devices; the result is in the same place.
          each: gets a function and the arrays of a matrix or of a stack of matrices. It may store
            them to call the function later, with all rows or with one row of each array.
        """
        plain = {part: tree for part, tree in params.items() if part not in self.adapters}
        for adapter, part in self.adapters.items():
            for name, pair in params.get(adapter, {}).items():
                fold = partial(each, partial(_fold_adapter, alpha=self.lora.alpha))
                plain[part] = _fold_into_tree(plain[part], name.split("."), pair, fold)
        return plain


def _add_adapter(
    alpha: float,
    adapter: Tree,
    input_dropout: InputDropout | None,
    next_call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    context: Any,
) -> Any:
    """Run a method of a Linen module; an adapted `Linear` adds its adapter."""
    output, linear = next_call(*args, **kwargs), context.module
    if not isinstance(linear, Linear) or context.method_name != "__call__":
        return output
    name = _matrix_name(linear)
    if name not in adapter:
        return output
    a, b = (adapter[name][side].astype(linear.dtype) for side in ("a", "b"))
    x = args[0] if input_dropout is None else input_dropout.drop(args[0], name)
    low = jnp.tensordot(x, a, axes=len(linear.in_shape))
    return output + alpha / b.shape[0] * jnp.tensordot(low, b, axes=1)


def _fold_into_tree(tree: Tree, path: list[str], pair: Tree, fold: Callable[..., Any]) -> Tree:
    """Return a part's parameters with an adapter merged into the matrix at a path."""
    if not path:
        return {**tree, KERNEL: fold(tree[KERNEL], pair["a"], pair["b"])}
    return {**tree, path[0]: _fold_into_tree(tree[path[0]], path[1:], pair, fold)}


@partial(jax.jit, static_argnames="alpha")
def _fold_adapter(kernel: Array, a: Array, b: Array, alpha: float) -> Array:
    """Return a kernel [*in, *out], or a stack of kernels, plus its adapter."""
    rank = a.shape[-1]
    stacked = a.ndim + b.ndim - 2 - kernel.ndim  # how often the dim of layers is counted
    product = partial(jnp.tensordot, axes=1, precision="highest")
    both = (jax.vmap(product) if stacked else product)(a, b)
    return kernel.astype(a.dtype) + alpha / rank * both
