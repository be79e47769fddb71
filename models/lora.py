"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + (alpha / rank) (x A) B, W staying fixed.

Which matrices are adapted is said by patterns of their names, GROUP.MATRIX: the freeze group of the
part that a matrix is in, and its name there ("llm.query", "vision.up", "connector.hidden"). A
module's layers and ends know nothing of it: `AdaptedModule` adds to what each of their `Linear`s
gives, and holds A and B of a part in a part beside it, in the freeze group "lora".

In training an adapter may not see all of x: `dropout` of its values are zero, the others larger by
as much (as arXiv 2106.09685 does it). Which is a function of a token's number (the field "seeds"),
the layer, the matrix and the place in x alone, so that it is the same in any plan, any packing, and
where it is computed again; where the number is 0, as in evaluation, all are seen.

B begins at zero, so an adapted model begins as the model that it adapts; `merged` folds adapters
into the weights for good.
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
Each = Callable[..., Any]  # (function, *arrays) -> what it gives, now or when it is asked for
GROUP = "lora"  # the freeze group of adapters
LAYERS = "layers"  # the part of a module whose layers are of one kind
SEEDS, LAYER = "seeds", "layer"  # fields: numbers of tokens, and which layer it is


@dataclass(frozen=True)
class Lora:
    """Which matrices are adapted, by adapters of which rank, and how strongly they act.

    Attributes:
      rank: of the adapters that `ranks` does not name.
      alpha: what the adapters add is scaled by alpha / rank.
      targets: patterns of the matrices that are adapted, as in a shell; one without a dot stands
        for all matrices of the groups that it matches.
      ranks: (pattern, rank) of some of them; of two that match, the later one counts.
      dropout: share of the values of x that an adapter does not see in training.
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
            raise ValueError(f"LoRA's dropout {self.dropout} must be from 0 to below 1")

    def rank_of(self, name: str) -> int:
        """Of the adapter of a matrix; 0 of one that is not adapted."""
        if not any(_matches(name, pattern) for pattern in self.targets):
            return 0
        ranks = [rank for pattern, rank in self.ranks if _matches(name, pattern)]
        return ranks[-1] if ranks else self.rank


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern if "." in pattern else f"{pattern}.*")


def adapter_part(part: str) -> str:
    """The part that holds the adapters of another."""
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
    """The matrices that a part of a module has as `Linear`s; of one layer where it is stacked."""
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
    """GROUP.MATRIX of every matrix of some modules that can be adapted."""
    groups = [(m, part, g) for m in modules.values() for part, g in m.freeze_groups.items()]
    return tuple(
        dict.fromkeys(f"{g}.{a.name}" for m, p, g in groups for a in linear_matrices(m, p))
    )


def add_adapters(modules: Mapping[str, Any], lora: Lora | None) -> dict[str, Any]:
    """Modules of a model, those with adapters that have any.

    Raises:
      ValueError: a pattern that matches no matrix, or the rank of one that is not adapted.
    """
    return dict(_adapted_items(tuple(modules.items()), lora)) if lora else dict(modules)


@lru_cache(maxsize=64)  # a model is asked for its modules again and again
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
                f"train.lora_ranks: {pattern!r} matches no matrix that train.lora_targets names; "
                f"those are {', '.join(targets)}"
            )
    adapted_modules = {name: AdaptedModule(module, lora) for name, module in modules.items()}
    return tuple((name, a if a.adapters else modules[name]) for name, a in adapted_modules.items())


# ---- a module with adapters ----


def call_now(function: Callable[..., Any], *arrays: Any) -> Any:
    """What a function gives, at once."""
    return function(*arrays)


@dataclass(frozen=True)
class AdaptedModule:
    """A module of the contract with adapters beside its parts."""

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
        """The parts that hold adapters, and of which part."""
        return {adapter_part(p): p for p in self.module.freeze_groups if self._ranks_by_matrix(p)}

    def _ranks_by_matrix(self, part: str) -> dict[Matrix, int]:
        """The adapted matrices of a part, and the ranks of their adapters."""
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
        """What a function gives for the parameters of a part while the part is adapted."""
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
        """Parameters of the plain module that computes what the adapted one does.

        Args:
          params: parts of the module, or of a segment of it, those of layers stacked; on the host
            or on devices, where the result then is too.
          each: gets a function and the arrays that a matrix, or a stack of such, is computed of;
            it may keep them, to call the function later, of all or of a row of each.
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
    """What a method of a Linen module gives; an adapted `Linear` with its adapter."""
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
    """Parameters of a part, the matrix at a path with its adapter folded in."""
    if not path:
        return {**tree, KERNEL: fold(tree[KERNEL], pair["a"], pair["b"])}
    return {**tree, path[0]: _fold_into_tree(tree[path[0]], path[1:], pair, fold)}


@partial(jax.jit, static_argnames="alpha")
def _fold_adapter(kernel: Array, a: Array, b: Array, alpha: float) -> Array:
    """A kernel [*in, *out], or a stack of such, plus its adapter."""
    rank = a.shape[-1]
    stacked = a.ndim + b.ndim - 2 - kernel.ndim  # how often the dim of layers is counted
    product = partial(jnp.tensordot, axes=1, precision="highest")
    both = (jax.vmap(product) if stacked else product)(a, b)
    return kernel.astype(a.dtype) + alpha / rank * both
