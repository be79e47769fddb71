"""Costs of the papers' models from programs compiled for their devices (`--costs compiled`).

A few layers of every module are compiled at two shapes and every tensor-parallel degree, with
nothing recomputed and with all layers recomputed; what was compiled stays in runs/cache. Minutes
for a model the first time, on 2 cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

from dflop_jax.config import Config, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.gpu_compile.chip_profile import profile_at
from dflop_jax.hardware import Hardware
from dflop_jax.records import ModelProfile
from experiments.paper import dip_models, orch, systems
from experiments.paper.cases import Case
from experiments.paper.common import say
from experiments.paper.systems import (
    DEGREES,
    DTYPE,
    INTERNVL_72B,
    LLAVA,
    MOST_DEVICES,
    QWEN2_AUDIO,
    Setup,
)

ITEMS, TOKENS = (4, 16), (2048, 8192)  # of the small and the large shape
_EVERY = 20  # programs between two lines about progress


@cache
def _models() -> dict[str, Callable[[], MultimodalModel]]:
    """Every model of the papers, by the name of its set-up or case."""
    setups = (*LLAVA.values(), INTERNVL_72B, QWEN2_AUDIO)
    found: dict[str, Callable[[], MultimodalModel]] = {
        s.name: partial(systems.model_of, s) for s in setups
    }
    return found | {c.name: c.model for c in (*dip_models.CASES, *orch.CASES)}


def build(size: str, dtype: str) -> MultimodalModel:
    """The model of a name, for the processes that compile; all are of one dtype."""
    assert dtype == DTYPE, "that of the papers' models"
    return _models()[size]()


def compiled_profile(model: MultimodalModel, hardware: Hardware) -> ModelProfile:
    """Times and bytes of a model on its devices, from programs compiled for them.

    Raises:
      ValueError: the compiler is not installed.
    """
    name = next(name for name, build_one in _models().items() if build_one() == model)
    config = Config(
        model=ModelConfig(factory="experiments.paper.compiled:build", size=name, dtype=DTYPE),
        plan=PlanConfig(hardware=hardware.name, devices=max(DEGREES)),
        train=TrainConfig(remat="layers"),
        cache_dir="runs/cache",
    )
    shapes = systems.shapes_of(model, ITEMS, TOKENS)
    return profile_at(config, model, hardware, shapes, DEGREES, MOST_DEVICES, partial(_say, name))


def compile_all(models: Iterable[Setup | Case]) -> None:
    """Compile what these need; other processes then find it in the cache.

    Raises:
      ValueError: the compiler is not installed.
    """
    for one in dict.fromkeys(models):
        if isinstance(one, Setup):
            systems.profile_of(one)
        else:
            systems.predicted(one.model(), one.hardware)


def _say(name: str, done: int, of: int) -> None:
    if done % _EVERY == 0 or done == of:
        say(f"{name}: {done} of {of} programs compiled")
