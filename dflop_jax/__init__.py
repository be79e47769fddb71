"""Data-aware training of multimodal LLMs on JAX device meshes.

The scheduler's worker process imports this package, so what needs JAX is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dflop_jax.config import CheckpointConfig as CheckpointConfig
from dflop_jax.config import Config as Config
from dflop_jax.config import DataConfig as DataConfig
from dflop_jax.config import DistributedConfig as DistributedConfig
from dflop_jax.config import ModelConfig as ModelConfig
from dflop_jax.config import PlanConfig as PlanConfig
from dflop_jax.config import ScheduleConfig as ScheduleConfig
from dflop_jax.config import TrainConfig as TrainConfig

if TYPE_CHECKING:
    from dflop_jax.plan.evaluate import simulate as simulate
    from dflop_jax.plan.search import search_plan as search_plan
    from dflop_jax.schedule import balance as balance
    from dflop_jax.schedule import choose_buckets as choose_buckets
    from dflop_jax.train.callbacks import Callback as Callback
    from dflop_jax.train.resume import Resume as Resume
    from dflop_jax.train.trainer import Trainer as Trainer

_LAZY = {
    "Callback": "dflop_jax.train.callbacks",
    "Resume": "dflop_jax.train.resume",
    "balance": "dflop_jax.schedule",
    "choose_buckets": "dflop_jax.schedule",
    "search_plan": "dflop_jax.plan.search",
    "simulate": "dflop_jax.plan.evaluate",
    "Trainer": "dflop_jax.train.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
