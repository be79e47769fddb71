"""What all encoders have in common: three Linen parts, called on the fields that they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import apply, axis_names, init_values

Array = jax.Array
Batch = Mapping[str, Array]


class Encoder(ABC):
    """A stack of equal layers between a stem and a connector."""

    size: Any
    dtype: jnp.dtype

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    @abstractmethod
    def item_tokens(self) -> int:
        """Tokens that it works on for one item."""

    @abstractmethod
    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct: ...

    @abstractmethod
    def _linen(self, part: str) -> nn.Module: ...

    @property
    def n_layers(self) -> int:
        return self.size.n_layers

    @property
    def tied(self) -> bool:
        return False

    def _part(self, part: str) -> tuple[nn.Module, tuple[jax.ShapeDtypeStruct, ...]]:
        """The Linen module of a part and what its inputs look like."""
        fields = [self.field_spec(name, 1, 0) for name in self.inputs[part]]
        hidden = jax.ShapeDtypeStruct((1, self.item_tokens, self.size.width), self.dtype)
        return self._linen(part), tuple(fields if part == "entry" else [hidden, *fields])

    def init(self, part: str, key: Array) -> Any:
        module, args = self._part(part)
        return init_values(module, key, *args)

    def logical_axes(self, part: str) -> Any:
        module, args = self._part(part)
        return axis_names(module, *args)

    def _apply(self, part: str, params: Any, batch: Batch, *hidden: Array) -> Array:
        fields = [batch[name] for name in self.inputs[part]]
        return apply(self._linen(part), params, *hidden, *fields)

    def entry(self, params: Any, batch: Batch) -> Array:
        return self._apply("entry", params, batch)

    def layer(self, params: Any, x: Array, batch: Batch) -> Array:
        return self._apply("layers", params, batch, x)

    def exit(self, params: Any, x: Array, batch: Batch, entry: Any = None) -> Array:
        return self._apply("exit", params, batch, x)
