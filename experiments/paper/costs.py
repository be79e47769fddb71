"""Predicted times and bytes of the papers' models from a roofline over traced kernels. All systems
share these costs."""

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
MAX_DEVICES = 4096
# Traced shapes have this many rows of one piece each, or one row of this many tokens.
PIECES, TOKENS = (1, 4, 16, 64), (512, 2048, 8192, 16384)


def get_cost_model(case: Case) -> CostModel:
    """Return the cost model of the case's model on its hardware, for any number of devices."""
    return _build_cost_model(case.name, case.model, case.hardware)


def get_profile(case: Case) -> ModelProfile:
    """Return the profile behind `get_cost_model`."""
    return get_cost_model(case).profile


def get_prices(case: Case, plan: Plan) -> Prices:
    return priced(plan.layout, get_cost_model(case), plan.scheduling.grouping)


@cache
def _build_cost_model(
    name: str, build: Callable[[], MultimodalModel], hardware: Hardware
) -> CostModel:
    model = build()
    shapes = {m: [Shape(1, t) for t in TOKENS] for m in model.modules}
    shapes |= {m: [Shape(n, tokens) for n in PIECES] for m, tokens in model.piece_tokens.items()}
    return CostModel(roofline_profile(model, hardware, shapes, DEGREES, n_devices=MAX_DEVICES))
