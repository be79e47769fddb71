"""Limits of the space of plans by what a job needs, against numbers computed by hand."""

import dataclasses
import math

import pytest

from dflop_jax import PlanConfig
from dflop_jax.cli.plan import describe_limits, describe_overlap
from dflop_jax.hardware import find_hardware
from dflop_jax.plan.search import search_plan
from dflop_jax.plan.search_spec import DEFAULT_LIMITS, SearchSpec, parallel_limits, with_limits
from dflop_jax.records import LayerTiming, Load, Shape
from tests.plan.cases import BATCH, CONFIG, TILE, data_profile, model_profile, on, prepared
from tests.plans import params, profile_of

A100 = find_hardware("a100-80").plannable_bytes  # 69.9e9
# Parameters of LLMs, layers, width: of Qwen2.5.
SIZES = {"7b": (7.6e9, 28, 3584), "32b": (32.8e9, 64, 5120), "72b": (72.7e9, 80, 8192)}


def limits_of_job(name, devices, batch, memory=A100, **given):
    """For an LLM and an encoder of 0.4e9 parameters, on nodes of 8."""
    parameters, layers, width = SIZES[name]
    timings = [
        LayerTiming(m, 1, Shape(1, 1024), 1e-3, 2e-3, 1e-3, 2e-3, 1024 * 2.0 * w)
        for m, w in (("vision", 1152), ("llm", width))
    ]
    layer_bytes = {"vision": int(4 * 0.4e9 / 27), "llm": int(4 * parameters / layers)}
    profile = profile_of(
        timings, {"vision": 27, "llm": layers}, layer_dims=params(layer_bytes, half=True),
        ends_bytes=0,
    )  # fmt: skip
    loads = [Load({"vision": (729,) * 4, "llm": (n,)}) for n in (2000, 5000)]
    spec = SearchSpec(devices, batch, PlanConfig(node=8, **given), memory)
    return tuple(with_limits(spec, profile, loads).limits.values())


@pytest.mark.parametrize("job, expected", [
    (("7b", 8, 128), (2, 4, 16)), (("7b", 1024, 4096), (2, 4, 16)),
    (("72b", 64, 2048, 0.0), (2, 4, 16)),  # nobody says what a device holds
    # Parameters in bfloat16 and gradients in float32 are 6 bytes each: 197e9 of 69.9e9.
    (("32b", 64, 512), (4, 4, 16)),
])  # fmt: skip
def test_small_jobs_keep_small_limits(job, expected):
    assert limits_of_job(*job) == expected
    assert tuple(DEFAULT_LIMITS.values()) == (2, 4, 16)


@pytest.mark.parametrize("batch", [1024, 2048, 4096])
def test_limits_grow_with_the_job(batch):
    """Inputs of 80 layers of a mean sample of 3,500 tokens, and of 27 of 2,916 patches."""
    sample = 3500 * 80 * 2 * 8192 + 2916 * 27 * 2 * 1152
    microbatches = min(128, 2 ** math.ceil(math.log2(8 * batch * sample / 64 / (A100 / 4))))
    assert limits_of_job("72b", 64, batch) == (8, 8, microbatches)
    given = {"max_model": 1, "max_stage": 3, "max_microbatches": 5}
    assert limits_of_job("72b", 64, batch, **given) == (1, 3, 5)
    # A shallower pipeline has fewer groups in flight.
    assert limits_of_job("72b", 64, 1024, max_stage=2)[2] < limits_of_job("72b", 64, 1024)[2]


@pytest.mark.parametrize("node", [1, 2, 8, 72])
@pytest.mark.parametrize("shares", [0.0, 0.3, 1.0, 1.1, 6.0, 500.0])
def test_degrees_hold_the_module_and_stay_in_a_node(node, shares):
    model, stage = parallel_limits(100 * shares, 100.0, node)
    assert 2 <= model <= max(2, node)
    assert model * stage >= max(8, shares)


def test_search_result_states_its_limits():
    """With limits of its own where none are given, and the plan then is that of these numbers."""
    asked = dataclasses.replace(CONFIG, effort="quick", **dict.fromkeys(DEFAULT_LIMITS, 0))
    given = dataclasses.replace(asked, **DEFAULT_LIMITS)
    own, same = (
        search_plan(model_profile(), data_profile(), config=config, n_devices=2,
                    global_batch=BATCH, refine=False)
        for config in (asked, given)
    )  # fmt: skip
    assert own.limits == DEFAULT_LIMITS
    assert own == same
    said = describe_limits(own.limits, dataclasses.replace(asked, max_stage=4))
    for one in ("max_model 2 (derived)", "max_stage 4 (given)", "33%"):
        assert one in said


def test_overlap_is_printed_with_its_source():
    measured = dataclasses.replace(find_hardware("h100"), link_overlap=0.875)
    said = describe_overlap(measured)
    assert "0.88 inside a node (measured), 0.50 across nodes (assumed)" in said


@pytest.mark.parametrize("module, tokens", [("vision", TILE), ("llm", 1)])
@pytest.mark.parametrize("remat, kept", [("none", 100), ("dots", 50), ("layers", 25)])
def test_stages_are_unrolled_in_runs_that_save_what_it_takes_to_compile(
    module, tokens, remat, kept
):
    """A layer takes 0.7 s for each of the two buckets, and a step saves four copies of the bytes
    that one of two devices keeps."""
    h100, loads = find_hardware("h100"), data_profile().loads
    amounts = [len(x.lengths(module)) * tokens if tokens > 1 else x.tokens(module) for x in loads]
    step_s = 4 * kept * BATCH * sum(amounts) / len(loads) / 2 / h100.memory_bandwidth
    for share, hardware, unrolled in ((0.99, h100, False), (1.01, h100, True), (1.01, None, False)):
        steps = round(share * 0.7 * CONFIG.buckets / step_s)
        context = prepared(2, on(hardware, model_profile()), steps=steps).context
        options = [o for o in context.options(module) if o.remat == remat]
        assert {o.unrolled for o in options if o.zero < 3} == {unrolled}
        assert not any(o.unrolled for o in options if o.zero == 3)
