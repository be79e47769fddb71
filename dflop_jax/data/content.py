"""What the pieces of samples ask of a model's modules beside tokens: the one place where content is
made of loads, by the module that counts it and the edges that it reads.

What a medium places is counted by itself, though another may stand right beside it where no text
marks their ends."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from dflop_jax.data.features import features_per_row
from dflop_jax.records import Edge, Load, Shape

if TYPE_CHECKING:  # processes that only decode do not load JAX
    from dflop_jax.contract import Module, MultimodalModel

# Tokens of a row of which is read how many outputs a module gives for each, where a row holds
# pieces of any length: squares of blocks up to 7 a side divide it.
_ROW_TOKENS = 420**2


def counted(model: MultimodalModel, load: Load) -> Load:
    """The load with the content of the modules that name its features."""
    from dflop_jax.contract import content_of, edges_of

    content = {}
    for name, module in model.modules.items():
        lengths = load.lengths(name)
        if not lengths or not hasattr(module, "content"):
            continue
        placed: dict[str, list[int]] = {}
        for edge in edges_of(model):
            if edge.target == name:
                placed.setdefault(edge.name, []).extend(_outputs(model, edge, load))
        assert len(lengths) == 1 or not any(placed.values()), f"{name!r}: outputs of which piece?"
        content[name] = tuple(tuple(content_of(module, n, placed).values()) for n in lengths)
    return replace(load, content=content) if content else load


def _outputs(model: MultimodalModel, edge: Edge, load: Load) -> list[int]:
    """How many outputs of an edge's source stand together, run by run."""
    lengths = load.lengths(edge.source)
    if not lengths:
        return []
    tokens = model.piece_tokens.get(edge.source, _ROW_TOKENS)
    of_row = _per_row(model.modules[edge.source], edge, tokens)
    outputs = iter([n * of_row // tokens for n in lengths])
    runs = load.runs.get(edge.source, (1,) * len(lengths))
    return [sum(islice(outputs, n)) for n in runs]


@lru_cache(maxsize=256)
def _per_row(module: Module, edge: Edge, tokens: int) -> int:
    return features_per_row(module, edge, Shape(1, tokens))
