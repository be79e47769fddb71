"""Feature shapes of modules, and the content of pieces: costs that do not follow from token counts.
A module with a `content` method computes the content of a piece from its tokens and the features
that each incoming edge gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from dflop_jax.records import Edge, Load, Shape

if TYPE_CHECKING:  # processes that only decode do not load JAX
    import jax

    from dflop_jax.contract import Module, MultimodalModel

# Row length in tokens that shows how many features a module gives per token, if its pieces have any
# length. It is divisible by the size of every block of 1 x 1 to 7 x 7 tokens.
_ROW_TOKENS = 420**2


def content_counter(model: MultimodalModel) -> Callable[[Load], Load]:
    """Return a function that adds the content of all modules that define it to a load."""
    from dflop_jax.contract import content_of, edges_of

    modules, piece_tokens = model.modules, model.piece_tokens
    content_modules = {
        name: module for name, module in modules.items() if hasattr(module, "content")
    }
    if not content_modules:
        return lambda load: load
    edges = edges_of(model)
    incoming_edges = {name: [e for e in edges if e.target == name] for name in content_modules}

    def add_content(load: Load) -> Load:
        content = {}
        for name, module in content_modules.items():
            lengths = load.lengths(name)
            if not lengths:
                continue
            outputs_by_edge: dict[str, list[int]] = {}
            for edge in incoming_edges[name]:
                tokens = piece_tokens.get(edge.source, _ROW_TOKENS)
                outputs = _outputs_per_run(modules[edge.source], edge, tokens, load)
                outputs_by_edge.setdefault(edge.name, []).extend(outputs)
            message = f"{name!r}: edges cannot feed one of several pieces"
            assert len(lengths) == 1 or not any(outputs_by_edge.values()), message
            content[name] = tuple(
                tuple(content_of(module, n, outputs_by_edge).values()) for n in lengths
            )
        return replace(load, content=content) if content else load

    return add_content


def _outputs_per_run(source: Module, edge: Edge, tokens: int, load: Load) -> list[int]:
    """Return how many features an edge takes from each run of adjacent pieces."""
    lengths = load.lengths(edge.source)
    if not lengths:
        return []
    outputs_per_row = features_per_row(source, edge, Shape(1, tokens))
    outputs = iter([n * outputs_per_row // tokens for n in lengths])
    runs = load.runs.get(edge.source, (1,) * len(lengths))
    return [sum(islice(outputs, n)) for n in runs]


def features_per_row(module: Module, edge: Edge, shape: Shape) -> int:
    """Return how many features an edge takes from each row of a module's bucket."""
    return int(features_struct(module, edge, shape).shape[1])


@lru_cache(maxsize=256)
def features_struct(module: Module, edge: Edge, shape: Shape) -> jax.ShapeDtypeStruct:
    """Return the array that an edge takes from a module's bucket, [rows, features, width]."""
    import jax

    def parameters(part: str) -> Any:
        return jax.eval_shape(lambda key: module.init(part, key), jax.random.key(0))

    def outputs(batch: Any, params: dict[str, Any]) -> jax.Array:
        x = module.entry(params["entry"], batch)
        if edge.tap:
            return module.tap(edge.tap, params.get(edge.tap), x, batch)  # type: ignore[attr-defined]
        entry = params["entry"] if module.tied else None
        return module.exit(params["exit"], x, batch, entry)

    exit_part = edge.tap or "exit"
    part_names = {"entry", exit_part} & {"entry", "exit", *module.inputs}
    field_names = {name for part in part_names for name in module.inputs.get(part, ())}
    batch = {name: module.field_spec(name, shape.rows, shape.tokens) for name in field_names}
    return jax.eval_shape(outputs, batch, {part: parameters(part) for part in part_names})
