"""Parameters that a run begins with: published weights, of the whole model or of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.pipeline.segment import Segment
from dflop_jax.weights import Folder, read_segment

# (segment, its fresh parameters if they are asked for) -> parameters to begin with
Initial = Callable[[Segment, Callable[[], Params]], Params]


def published(model: MultimodalModel, weights: Sequence[str]) -> Initial | None:
    """Return how to begin with the checkpoints of `weights`, checked to fit; None for none.

    Args:
      weights: one folder of transformers for the whole model, or MODULE=FOLDER for some modules;
        what these leave out (a connector) begins fresh.

    Raises:
      ValueError: a folder that does not hold this model (or this module), or a model or module
        without published weights.
    """
    if not weights:
        return None
    folders: dict[str, Folder] = {}
    for item in weights:
        module, _, path = item.rpartition("=")
        folders[module] = Folder(path, _map(model, module, len(weights) == 1))
        folders[module].check()

    def begin(segment: Segment, fresh: Callable[[], Params]) -> Params:
        folder = folders.get("") or folders.get(segment.plan.module)
        return fresh() if folder is None else read_segment(folder, segment, fresh)

    return begin


def _map(model: MultimodalModel, module: str, alone: bool) -> Any:
    """Return where a checkpoint has the parameters of a module, or ("") of the whole model."""
    if not module:
        if not alone:
            raise ValueError("model.weights: one folder of the whole model, or MODULE=FOLDER each")
        whole = getattr(model, "weights", None)
        if whole is None:
            raise ValueError(
                "model.weights: this model has no published form; give MODULE=FOLDER for its parts"
            )
        return whole
    parts = getattr(model, "part_weights", {})
    if module not in parts:
        known = ", ".join(parts) or "none"
        raise ValueError(f"model.weights: no published weights of {module!r}; known: {known}")
    return parts[module]()
