"""Limits of the space of plans by what a job needs, against numbers computed by hand."""

import dataclasses
import math

import pytest

from dflop_jax import PlanConfig
from dflop_jax.cli.plan import describe_limits as explained
from dflop_jax.hardware import find_hardware
from dflop_jax.plan.search import search_plan
from dflop_jax.plan.search_spec import (
    DEFAULT_LIMITS,
    SearchSpec,
    largest_module_bytes,
    microbatch_limit,
    parallel_limits,
    with_limits,
)
from dflop_jax.records import LayerTiming, Load, Shape
from tests.plan.cases import BATCH, CONFIG, data_profile, model_profile
from tests.plans import params, profile_of

A100 = find_hardware("a100-80").plannable_bytes  # 69.9e9
# Parameters of LLMs, layers, width: of Qwen2.5.
SIZES = {"7b": (7.6e9, 28, 3584), "32b": (32.8e9, 64, 5120), "72b": (72.7e9, 80, 8192)}


def published(name):
    """A profile that says an LLM's bytes, with an encoder of 0.4e9 parameters."""
    parameters, layers, width = SIZES[name]
    timings = [
        LayerTiming(m, 1, Shape(1, 1024), 1e-3, 2e-3, 1e-3, 2e-3, 1024 * 2.0 * w)
        for m, w in (("vision", 1152), ("llm", width))
    ]
    layer_bytes = {"vision": int(4 * 0.4e9 / 27), "llm": int(4 * parameters / layers)}
    return profile_of(
        timings, {"vision": 27, "llm": layers}, layer_dims=params(layer_bytes, half=True),
        ends_bytes=0,
    )  # fmt: skip


def limits_of_job(name, devices, batch, config=None, memory=A100, node=8):
    loads = [Load({"vision": (729,) * 4, "llm": (n,)}) for n in (2000, 5000)]
    config = dataclasses.replace(config or PlanConfig(), node=node)
    spec = SearchSpec(devices, batch, config, memory)
    limited = with_limits(spec, published(name), loads).config
    return limited.max_model, limited.max_stage, limited.max_microbatches


def test_one_node_of_a_small_model_keeps_small_limits():
    assert limits_of_job("7b", 8, 128) == tuple(DEFAULT_LIMITS.values()) == (2, 4, 16)
    assert limits_of_job("7b", 1024, 4096) == (2, 4, 16)
    assert limits_of_job("7b", 8, 128, memory=0.0) == (2, 4, 16)  # nobody says what a device holds
    assert limits_of_job("72b", 64, 2048, memory=0.0) == (2, 4, 16)


def test_limits_grow_with_the_job():
    """Parameters in bfloat16 and gradients in float32 are 6 bytes each: 197e9 and 436e9 of 69.9e9.
    Inputs of 64 and 80 layers of a mean sample of 3,500 tokens, and of 27 of 2,916 patches."""
    assert limits_of_job("32b", 64, 512) == (4, 4, 16)
    assert limits_of_job("72b", 64, 512)[:2] == (8, 8)
    sample = 3500 * 80 * 2 * 8192 + 2916 * 27 * 2 * 1152
    for batch in (1024, 2048, 4096):
        needed = 8 * batch * sample / 64 / (A100 / 4)
        microbatches = limits_of_job("72b", 64, batch)[2]
        assert microbatches == min(128, 2 ** math.ceil(math.log2(needed)))
    assert limits_of_job("72b", 64, 2048)[2] > 16
    assert limits_of_job("7b", 8, 1024)[2] > 16  # more samples on a device


def test_configured_limits_replace_those_of_the_job():
    given = PlanConfig(max_model=1, max_stage=3, max_microbatches=5)
    assert limits_of_job("72b", 64, 2048, given) == (1, 3, 5)
    assert limits_of_job("72b", 64, 2048, PlanConfig(max_microbatches=5)) == (8, 8, 5)
    # A shallower pipeline has fewer groups in flight.
    assert (
        limits_of_job("72b", 64, 1024, PlanConfig(max_stage=2))[2]
        < limits_of_job("72b", 64, 1024)[2]
    )


@pytest.mark.parametrize("node", [1, 2, 4, 8, 72])
@pytest.mark.parametrize("shares", [0.0, 0.3, 1.0, 1.1, 4.0, 6.0, 40.0, 500.0])
def test_degrees_hold_the_module_and_stay_in_a_node(node, shares):
    model, stage = parallel_limits(100 * shares, 100.0, node)
    assert 2 <= model <= max(2, node)
    assert stage >= 4
    assert model * stage >= shares
    if shares <= 1:
        assert (model, stage) == (2, 4)
    assert parallel_limits(100 * shares, 0.0, node) == (2, 4)


def test_largest_module_bytes_and_microbatch_limits():
    assert largest_module_bytes({"a": 400.0, "b": 500.0}, ["b"]) == 800  # 400 + 400; 250 + 500
    assert microbatch_limit(0.0, 100.0, 8, 4) == 16
    assert microbatch_limit(1e30, 100.0, 8, 4) == 128


def test_search_result_states_its_limits():
    """With limits of its own where none are given, and the plan then is that of these numbers."""
    asked = dataclasses.replace(CONFIG, effort="quick", max_model=0, max_stage=0)
    asked = dataclasses.replace(asked, max_microbatches=0)
    profile, data = model_profile(), data_profile()
    given = dataclasses.replace(asked, max_model=2, max_stage=4, max_microbatches=16)
    small = {"n_devices": 2, "global_batch": BATCH, "refine": False}
    own = search_plan(profile, data, config=asked, **small)
    assert own.limits == DEFAULT_LIMITS
    assert own == search_plan(profile, data, config=given, **small)
    said = explained(own.limits, dataclasses.replace(asked, max_stage=4))
    for one in ("max_model 2 (by the job)", "max_stage 4 (given)", "33%"):
        assert one in said
