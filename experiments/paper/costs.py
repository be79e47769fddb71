"""Predicted times and bytes of the papers' models, which all systems share: a roofline over traced
kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from dflop_jax.contract import MultimodalModel
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.cost_model import layout_prices as priced
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.records import Hardware, ModelProfile, Plan, Prices, Shape
from experiments.paper.cases import Case

DTYPE = "bfloat16"
DEGREES = (1, 2, 4, 8)  # of tensor parallelism
MOST_DEVICES = 4096
# Pieces and tokens of the shapes that are traced: rows of one piece each, or one row.
ITEMS, TOKENS = (1, 4, 16, 64), (512, 2048, 8192, 16384)


def cost_model(case: Case) -> CostModel:
    """Prices and bytes of the case's model on its devices, however many these are."""
    return _cost_model(case.name, case.model, case.hardware)


def profile_of(case: Case) -> ModelProfile:
    """What `cost_model` is made of."""
    return cost_model(case).profile


def prices_of(case: Case, plan: Plan) -> Prices:
    return priced(plan.layout, cost_model(case))


@cache
def _cost_model(name: str, model: Callable[[], MultimodalModel], hardware: Hardware) -> CostModel:
    made = model()
    alone = made.piece_tokens
    shapes = {
        m: [Shape(n, alone[m]) for n in ITEMS] if m in alone else [Shape(1, t) for t in TOKENS]
        for m in made.modules
    }
    return CostModel(roofline_profile(made, hardware, shapes, DEGREES, n_devices=MOST_DEVICES))
