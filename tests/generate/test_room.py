"""Room for answers: bytes by hand, and plans that leave them free."""

import dataclasses
from functools import partial
from math import prod

import jax
import pytest

from dflop_jax import Config, PlanConfig
from dflop_jax.contract import n_rows, stacked_parts
from dflop_jax.evaluate.in_training import answer_bytes
from dflop_jax.generate.room import GROWING, device_bytes
from dflop_jax.records import PLANNED_SHARE
from dflop_jax.train.prepare import set_up
from models import gemma, llava, qwen3_5


def parameter_bytes(model):
    """Float32, every layer counted alone."""
    total = 0
    for module in model.modules.values():
        for part in module.inputs:
            fresh = jax.eval_shape(partial(module.init, part), jax.random.key(0))
            each = sum(4 * prod(a.shape) for a in jax.tree.leaves(fresh))
            total += each * (n_rows(module, part) if part in stacked_parts(module) else 1)
    return total


def test_keys_and_values_of_all_slots_beside_the_parameters():
    model = llava.build("nano")
    llm = model.modules["llm"].size
    # 200 tokens take 256 slots.
    row_bytes = 2 * llm.n_layers * llm.n_kv_heads * llm.head_dim * 256 * 4
    params = parameter_bytes(model)
    assert device_bytes(model, 3000, 200, 1) == params + GROWING * 3000 * row_bytes
    assert device_bytes(model, 1, 1, 1) == pytest.approx(params / 0.7)


@pytest.mark.parametrize(
    "build, size", [(qwen3_5.build, "qwen3.5-nano"), (gemma.build, "gemma3-nano")]
)
def test_other_kinds_of_layers_keep_something_too(build, size):
    """States of delta nets do not grow with the tokens, windows less than the others."""
    model = build(size)
    params = parameter_bytes(model)
    few, more = (device_bytes(model, 10_000, 128 * n, 1) for n in (1, 2))
    assert params < few < more < 2 * few - params
    assert device_bytes(model, 10_000, 128, 2) < few


def test_plans_leave_room():
    asked = Config(plan=PlanConfig(hardware="h100", devices=4))
    place = set_up(asked)
    whole = place.plannable_bytes
    assert whole == PLANNED_SHARE * place.hardware.usable_bytes
    room = answer_bytes(place)
    assert 0 < room < 0.01 * whole
    left = dataclasses.replace(place, reserved_bytes=room)
    assert left.plannable_bytes == whole - room
    # Where nothing is left no plan fits; it is not taken for memory without a limit.
    assert dataclasses.replace(place, reserved_bytes=2 * whole).plannable_bytes == 1
