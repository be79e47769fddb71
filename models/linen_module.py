"""The common base of all modules here: parts that are Linen modules, called with the fields that
they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import AttentionFunction, bind_attention
from models.attention_choice import MIN_KERNEL_TOKENS, skips
from models.layers import apply, axis_names, init_values

Array = jax.Array
Batch = Mapping[str, Array]


class LinenModule(ABC):
    """A module of the contract, see `dflop_jax.contract`. A subclass is a dataclass with these
    fields; `size` has `n_layers` and `head_dim`."""

    size: Any
    dtype: jnp.dtype
    attention_kernel: str
    chip: str

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, tuple[str, ...]]: ...

    @abstractmethod
    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct: ...

    @abstractmethod
    def _linen_part(self, part: str) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return the Linen module of a part and example structs of its inputs."""

    def on_chip(self, chip: str) -> Self:
        module: Any = self
        return replace(module, chip=chip)

    @property
    def working_dtype(self) -> jnp.dtype:
        return self.dtype

    @property
    def n_layers(self) -> int:
        return self.size.n_layers

    @property
    def tied(self) -> bool:
        return False

    @property
    def allows_nondeterminism(self) -> bool:
        return self.attention_kernel == "cudnn"

    @property
    def row_tokens(self) -> int:
        """Tokens of the shortest row that affects the choice of a kernel."""
        return MIN_KERNEL_TOKENS

    @property
    def skips(self) -> bool:
        kernel_choice = self.attention_kernel, self.chip, self.dtype
        return skips(*kernel_choice, self.size.head_dim, self.row_tokens)

    @property
    def attend(self) -> AttentionFunction:
        """`models.attention.attention` by the module's kernel."""
        return bind_attention(self.attention_kernel, self.chip)

    def init(self, part: str, key: Array) -> Any:
        module, args = self._linen_part(part)
        return init_values(module, key, *args)

    def logical_axes(self, part: str) -> Any:
        module, args = self._linen_part(part)
        return axis_names(module, *args)

    def entry(self, params: Any, batch: Batch) -> Array:
        return apply(
            self._linen_part("entry")[0], params, *(batch[n] for n in self.inputs["entry"])
        )
