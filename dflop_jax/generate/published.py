"""Parameters of a folder of published weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.train.load_params import Loaded
from dflop_jax.weights import Folder, read_params
from dflop_jax.weights.folder import CONFIG


def is_published(folder: str | Path) -> bool:
    """Whether a folder has a model as transformers writes it."""
    try:
        config = json.loads((Path(folder) / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


def published_params(
    folder: str | Path, model: MultimodalModel, structs: Mapping[str, Params]
) -> Loaded | None:
    """Those of a folder that transformers wrote, laid out as `structs` say; None of another.

    Raises:
      ValueError: the folder does not hold this model.
    """
    if not is_published(folder):
        return None
    weights: Any = getattr(model, "weights", None)
    if weights is None:
        raise ValueError(f"{folder}: a {type(model).__name__} has no published form; name a run")
    opened = Folder(folder, weights)
    opened.check()
    params = {m: read_params(opened, m, structs[m]) for m in model.modules}
    return Loaded(params, 0, Path(folder))
