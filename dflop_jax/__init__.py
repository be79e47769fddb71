"""Data-aware training of multimodal LLMs on JAX device meshes.

The scheduler's worker process imports this package, so what needs JAX is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dflop_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    PlanConfig,
    ScheduleConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from dflop_jax.plan.predict import simulate
    from dflop_jax.plan.search import search_plan
    from dflop_jax.schedule import balance, choose_buckets
    from dflop_jax.train.callbacks import Callback
    from dflop_jax.train.resume import Resume
    from dflop_jax.train.trainer import Trainer

_LAZY = {
    "Callback": "dflop_jax.train.callbacks",
    "Resume": "dflop_jax.train.resume",
    "balance": "dflop_jax.schedule",
    "choose_buckets": "dflop_jax.schedule",
    "search_plan": "dflop_jax.plan.search",
    "simulate": "dflop_jax.plan.predict",
    "Trainer": "dflop_jax.train.trainer",
}

__all__ = [
    "Callback",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "ModelConfig",
    "PlanConfig",
    "Resume",
    "ScheduleConfig",
    "TrainConfig",
    "Trainer",
    "balance",
    "choose_buckets",
    "search_plan",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
