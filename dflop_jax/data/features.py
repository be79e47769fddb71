"""The features that a module gives, read off its functions without running them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dflop_jax.records import Edge, Shape

if TYPE_CHECKING:  # processes that only decode do not load JAX
    import jax

    from dflop_jax.contract import Module


def features_per_row(module: Module, edge: Edge, shape: Shape) -> int:
    """Return the features that an edge takes from each row of a module at a shape."""
    return int(features_struct(module, edge, shape).shape[1])


@lru_cache(maxsize=256)
def features_struct(module: Module, edge: Edge, shape: Shape) -> jax.ShapeDtypeStruct:
    """Return what an edge takes from a module at a shape, [rows, features, width]."""
    import jax

    def parameters(part: str) -> Any:
        return jax.eval_shape(lambda key: module.init(part, key), jax.random.key(0))

    def outputs(batch: Any, params: dict[str, Any]) -> jax.Array:
        x = module.entry(params["entry"], batch)
        if edge.tap:
            return module.tap(edge.tap, params.get(edge.tap), x, batch)  # type: ignore[attr-defined]
        entry = params["entry"] if module.tied else None
        return module.exit(params["exit"], x, batch, entry)

    end = edge.tap or "exit"
    parts = {"entry", end} & {"entry", "exit", *module.inputs}
    names = {name for part in parts for name in module.inputs.get(part, ())}
    batch = {name: module.field_spec(name, shape.rows, shape.tokens) for name in names}
    return jax.eval_shape(outputs, batch, {part: parameters(part) for part in parts})
