"""Profiles, data and the exhaustive search that the planner is compared with."""

import dataclasses
import functools
import itertools

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.hardware import find_hardware
from dflop_jax.pipeline.order import in_flight_limit
from dflop_jax.plan.evaluate import sample_batches
from dflop_jax.plan.links import send_seconds, step_end_seconds
from dflop_jax.plan.load import CUTS
from dflop_jax.plan.placement import lay_out
from dflop_jax.plan.space import SPACES
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    Bucket,
    DataProfile,
    LayerTiming,
    ModelProfile,
    ModuleShape,
    Plan,
    SampleShape,
)
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.shapes.choose import BucketChoice
from dflop_jax.sim.memory import peak_bytes
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.sim.predict import bucket_costs

LINKS = dataclasses.replace(
    find_hardware("cpu"), link_bandwidth=4e6, network_bandwidth=1e6, devices_per_node=4
)

BATCH = 8
CONFIG = PlanConfig(
    buckets=2, max_model=2, max_stage=2, max_microbatches=8, sampled_batches=2, devices=0
)


def model_profile(vision=1.0, llm=1.0, *, degrees=(1, 2), concurrency=8.0, modules=2):
    """Times from a formula; `vision` and `llm` weigh the modules, tensor parallelism is 80 %."""
    timings = []
    for module, weight, shapes in (
        ("vision", vision, [(1, 16), (4, 16), (16, 16)]),
        ("llm", llm, [(1, 32), (1, 128), (4, 64)]),
    )[2 - modules :]:
        for tp in degrees:
            for items, tokens in shapes:
                f = weight * (1e-4 + 2e-6 * items * tokens + 1e-8 * items * tokens**2)
                f /= tp**0.7
                temp = 100.0 * items * tokens / tp
                shape = ModuleShape(items, tokens)
                timings.append(LayerTiming(module, tp, shape, f, 3 * f, f, 3 * f, temp, temp, temp))
    names = ("vision", "llm")[2 - modules :]
    return ModelProfile(
        key="k",
        device="cpu",
        timings=tuple(timings),
        layer_param_bytes=dict.fromkeys(names, 10_000),
        ends_param_bytes=dict.fromkeys(names, 5_000),
        n_layers={"vision": 2, "llm": 4} if modules == 2 else {"llm": 4},
        entry_share=dict.fromkeys(names, 0.3),
        item_tokens={"vision": 16},
        concurrency=concurrency,
        task_overhead_s=1e-4,
    )


@functools.cache
def data_profile(tiles=True):
    rng = np.random.default_rng(0)
    counts = np.minimum(rng.pareto(1.2, 60) * 2, 9).astype(int) * tiles
    shapes = [SampleShape(int(t), 20, int(4 * t + rng.integers(10, 60))) for t in counts]
    return DataProfile("made up", 60, tuple(shapes))


def simple_buckets(
    shapes, *, global_batch, vision_ranks, llm_ranks, token_multiple, max_microbatches, **_
):
    """A rule in place of the bucket search, which has tests of its own and takes seconds: what
    the largest sample or an even share of the batch needs, and a bucket without tiles."""

    def capacity(load, ranks, multiple):
        share = global_batch * np.mean(load) / max_microbatches
        need = max(max(load), 1.3 * share) / max(ranks, 1)
        return int(-(-need // multiple) * multiple)

    tiles = capacity([s.tiles for s in shapes], vision_ranks, 1)
    longest = max(s.llm_tokens for s in shapes)
    tokens = capacity([s.llm_tokens for s in shapes], llm_ranks, token_multiple)
    tokens = max(tokens, -(-longest // token_multiple) * token_multiple)
    both = (Bucket(tiles, tokens), Bucket(0, tokens))
    return BucketChoice(both[: 1 + (tiles > 0)], 0.0, {})


def bucket_of(cut, group_size, data, profile, ranks, model):
    """The bucket that cuts a mean batch into `cut` groups: 5 % above the even share, enough for
    the largest sample; of several row counts the cheapest per token."""
    mean = {m: BATCH * np.mean([s.load(m) for s in data.shapes]) for m in ranks}
    most = {m: max(s.load(m) for s in data.shapes) for m in ranks}
    n = cut * group_size

    def up(x):
        return int(np.ceil(x - 1e-9))

    tiles = 0
    if "vision" in ranks and most["vision"]:
        share = up(mean["vision"] * 1.05 / n / ranks["vision"])
        tiles = max(share, up(most["vision"] / ranks["vision"]))
    share, longest = mean["llm"] * 1.05 / n / ranks["llm"], 32 * up(most["llm"] / 32)
    costs, rows_of = CostModel(profile), []
    for rows in (1, 2, 4, 8):
        tokens = max(longest, 32 * up(share / rows / 32))
        price = float(costs.predict("llm", model, rows, tokens, "layer_backward")) / rows / tokens
        if rows == 1 or (share > (rows - 0.5) * longest and price < rows_of[-1][0] * (1 - 1e-9)):
            rows_of.append((price, rows, tokens))
    _, rows, tokens = rows_of[-1]
    return Bucket(tiles, tokens, rows)


def in_nodes(place, size):
    """Whether every group of tensor-parallel devices lies in one node."""
    starts = [(m, d) for m in place.submeshes for d in m.devices[:: m.model]]
    return all(d // size == (d + m.model - 1) // size for m, d in starts)


def exhaustive(policy, n_devices, profile, data, config, hardware=None, trains=None, remat=False):
    """(placement, microbatches, makespan, peak bytes) of everything, with every remat if asked."""
    trains = trains or (lambda s: True)
    costs = CostModel(profile)
    ends = {}
    for t in sorted(profile.timings, key=lambda t: t.shape.size):
        both = (t.ends_forward_s + t.ends_backward_s) / (t.layer_forward_s + t.layer_backward_s)
        share = profile.entry_share[t.module]
        ends[t.module, t.model] = (both * share, both * (1 - share))
    batches = sample_batches(data.shapes, BATCH, config.sampled_batches)
    found = []
    groups_of = {}  # one bucket's schedule does not depend on seconds
    kinds = ("none", "layers") if remat else ("none",)
    limits = {"max_model": config.max_model, "max_stage": config.max_stage}
    for outline in SPACES[policy](n_devices, profile.n_layers, tied=False, **limits):
        place = lay_out(outline, profile.n_layers, ends)
        if hardware and not in_nodes(place, hardware.devices_per_node):
            continue
        top = max(1, config.max_microbatches // place.group_size)
        for cut in sorted({*(c for c in CUTS if c < top), top}):
            for remats in itertools.product(kinds, repeat=len(profile.n_layers)):
                of = dict(zip(profile.n_layers, remats, strict=True))
                segments = tuple(dataclasses.replace(s, remat=of[s.module]) for s in place.segments)
                plan = Plan(policy, place.submeshes, segments, (Bucket(1, 1),), place.group_size)
                ranks = {m: plan.data_ranks(m) for m in plan.modules}
                model = plan.submesh(plan.segments[-1].submesh).model
                bucket = bucket_of(cut, plan.group_size, data, profile, ranks, model)
                plan = dataclasses.replace(plan, buckets=(bucket,))
                names = [s.name for s in segments if trains(s)]
                peak = max(peak_bytes(plan, costs, in_flight_limit(plan), names).values())
                seconds = costs.task_seconds(plan)
                prices = bucket_costs(plan, seconds, names)
                key = (plan.group_size, bucket, *ranks.values())
                if key not in groups_of:
                    schedules = [schedule_batch(b, plan, prices, max_rounds=400) for b in batches]
                    groups_of[key] = [len(s.groups) for s in schedules]
                took = {
                    n: simulate_step(
                        plan,
                        [0] * n,
                        seconds | step_end_seconds(plan, profile, hardware),
                        names,
                        concurrency=profile.concurrency,
                        sends=send_seconds(plan, costs, hardware),
                    ).makespan_s
                    for n in set(groups_of[key])
                }
                mean = float(np.mean([took[n] for n in groups_of[key]]))
                found.append((place.name, cut * plan.group_size, mean, peak))
    return found


def random_case(seed):
    """A profile, batch data, memory and links of a seed; sizes so small that all can be tried."""
    rng = np.random.default_rng(seed)
    n_devices = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 4, 5, 16, 6, 7, 8, 13, 16][seed % 20]
    timings = []
    for module, shapes in (("vision", [(1, 16), (4, 16)]), ("llm", [(1, 32), (1, 128), (4, 64)])):
        a, b, c = 10 ** rng.uniform([-5, -6.5, -9], [-4, -5, -8])
        temp, kept = rng.uniform(20, 200, 2)
        for tp in (1, 2):
            for items, tokens in shapes:
                f = (a + b * items * tokens + c * items * tokens**2) / tp ** rng.uniform(0.4, 1)
                ends = f * rng.uniform(0, 3)
                held = items * tokens / tp
                timings.append(
                    LayerTiming(module, tp, ModuleShape(items, tokens), f, f * rng.uniform(2, 4),
                                ends, 3 * ends, temp * held, 2 * temp * held, kept * held)
                )  # fmt: skip
    profile = ModelProfile(
        key=f"random {seed}",
        device="cpu",
        timings=tuple(timings),
        layer_param_bytes={m: int(rng.integers(1_000, 20_000)) for m in ("vision", "llm")},
        ends_param_bytes={m: int(rng.integers(0, 20_000)) for m in ("vision", "llm")},
        n_layers={"vision": int(rng.integers(1, 5)), "llm": int(rng.integers(1, 6))},
        entry_share={m: float(rng.uniform()) for m in ("vision", "llm")},
        item_tokens={"vision": 16},
        concurrency=float(rng.choice([1.5, n_devices])),
        task_overhead_s=float(10 ** rng.uniform(-6, -4)),
    )
    counts = rng.integers(0, rng.integers(1, 9), 30)
    shapes = [SampleShape(int(t), 20, int(4 * t + rng.integers(10, 80))) for t in counts]
    hardware = LINKS if seed % 2 else None
    return profile, DataProfile("random", 30, tuple(shapes)), n_devices, hardware, rng
