"""Predicted times and bytes of the papers' models, which all systems share.

By a roofline over traced kernels, or from programs that are compiled for the devices (`--costs
compiled`): a few layers of every module at two shapes and every tensor-parallel degree, with
nothing recomputed and with all layers recomputed. What was compiled stays in runs/cache; it takes
minutes for a model the first time, on 2 cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from dflop_jax.config import Config, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.gpu_compile.chip_profile import profile_at
from dflop_jax.plan.pricing import prices_of as priced
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.records import Hardware, ModelProfile, Plan, Prices, Shape
from experiments.paper.cases import Case
from experiments.paper.results import say

DTYPE = "bfloat16"
DEGREES = (1, 2, 4, 8)  # of tensor parallelism
MOST_DEVICES = 4096
# Pieces and tokens of the shapes that are traced, and of those that are compiled.
ITEMS, TOKENS = (1, 4, 16, 64), (512, 2048, 8192, 16384)
COMPILED_ITEMS, COMPILED_TOKENS = (4, 16), (2048, 8192)
FACTORY = "experiments.paper.compiled:build"  # of every model, by the name of its case
_EVERY = 20  # programs between two lines about progress

COSTS = ("roofline", "compiled")
_costs = COSTS[0]


def take_costs(name: str) -> None:
    """Say where this process has predicted costs from, one of `COSTS`; before the first of them."""
    global _costs
    _costs = name


def costs() -> str:
    """What `take_costs` was told."""
    return _costs


def cost_model(case: Case) -> CostModel:
    """Prices and bytes of the case's model on its devices, however many these are.

    Raises:
      ValueError: the compiler is not installed.
    """
    return _cost_model(case.name, case.model, case.hardware)


def profile_of(case: Case) -> ModelProfile:
    """What `cost_model` is made of."""
    return cost_model(case).profile


def prices_of(case: Case, plan: Plan) -> Prices:
    return priced(plan.layout, cost_model(case))


@cache
def _cost_model(name: str, model: Callable[[], MultimodalModel], hardware: Hardware) -> CostModel:
    if _costs == "compiled":
        return CostModel(_compiled(name, model(), hardware))
    shapes = shapes_of(model(), ITEMS, TOKENS)
    return CostModel(roofline_profile(model(), hardware, shapes, DEGREES, n_devices=MOST_DEVICES))


def _compiled(name: str, model: MultimodalModel, hardware: Hardware) -> ModelProfile:
    config = Config(
        model=ModelConfig(factory=FACTORY, size=name, dtype=DTYPE),
        plan=PlanConfig(hardware=hardware.name, devices=max(DEGREES)),
        train=TrainConfig(remat="layers"),
        cache_dir="runs/cache",
    )
    shapes = shapes_of(model, COMPILED_ITEMS, COMPILED_TOKENS)
    return profile_at(config, model, hardware, shapes, DEGREES, MOST_DEVICES, partial(_say, name))


def shapes_of(
    model: MultimodalModel, items: Sequence[int], tokens: Sequence[int]
) -> dict[str, list[Shape]]:
    """By module rows of one piece each, or one row of so many tokens."""
    alone = model.piece_tokens
    return {
        m: [Shape(n, alone[m]) for n in items] if m in alone else [Shape(1, t) for t in tokens]
        for m in model.modules
    }


def _say(name: str, done: int, of: int) -> None:
    if done % _EVERY == 0 or done == of:
        say(f"{name}: {done} of {of} programs compiled")
