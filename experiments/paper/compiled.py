"""Every model of the papers by the name of its case, for processes that compile its programs."""

from __future__ import annotations

from dflop_jax.contract import MultimodalModel
from experiments.paper import dip_models, orch, systems
from experiments.paper.costs import DTYPE

CASES = (
    *systems.LLAVA.values(),
    systems.INTERNVL_72B,
    systems.QWEN2_AUDIO,
    *dip_models.CASES,
    *orch.CASES,
)


def build(size: str, dtype: str) -> MultimodalModel:
    """The model of a case's name; all are of one dtype."""
    assert dtype == DTYPE, "that of the papers' models"
    return next(c.model for c in CASES if c.name == size)()
