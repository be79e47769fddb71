"""Profiles, data and the exhaustive search that the planner is compared with."""

import dataclasses
import functools
import itertools
import math

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.hardware import find_hardware
from dflop_jax.plan import refine_buckets
from dflop_jax.plan.placement import SpaceLimits
from dflop_jax.plan.search import SearchResult, build_evaluator, search_plan
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.records import (
    DataProfile,
    Edge,
    Group,
    LayerTiming,
    Load,
    Recompute,
    Schedule,
    Shape,
)
from dflop_jax.simulate.steps import simulate_step
from tests.plans import params, profile_of

LINKS = dataclasses.replace(
    find_hardware("cpu"), link_bandwidth=4e6, network_bandwidth=1e6, devices_per_node=4
)
TILE = 16  # tokens of a piece of "vision", which takes one a row

BATCH = 8
CONFIG = PlanConfig(
    policy="dflop", buckets=2, max_model=2, max_stage=2, max_microbatches=8, sampled_batches=2,
    devices=0,
)  # fmt: skip
# Graphs of modules: name -> (layers of each module, edges).
GRAPHS = {
    "one": ({"llm": 4}, ()),
    "two": ({"vision": 2, "llm": 4}, (Edge("vision", "llm", "v"),)),
    "apart": ({"vision": 2, "audio": 1, "llm": 3},
              (Edge("vision", "llm", "v"), Edge("audio", "llm", "a"))),
    "chain": ({"vision": 2, "llm": 3, "generator": 2},
              (Edge("vision", "llm", "v"), Edge("llm", "generator", "h"))),
    "taps": ({"vision": 3, "llm": 3, "generator": 2},
             (Edge("vision", "llm", "v"),
              Edge("vision", "llm", "deep", tap="middle", leaves=1, enters=1),
              Edge("llm", "generator", "h"), Edge("vision", "generator", "w"))),
}  # fmt: skip


def recompute(layer_s, ends_s, kept, less, pair_s=0.0):
    """Policies from what a forward takes and keeps: "dots" repeats a third of it and keeps half,
    "layers" repeats all and keeps the share `less`."""
    content_s = {"pair": pair_s}
    return {
        "none": Recompute(0.0, 0.0, {}, kept, kept, kept),
        "dots": Recompute(layer_s / 3, ends_s / 3, content_s, kept / 2, kept / 2, 1.2 * kept),
        "layers": Recompute(layer_s, ends_s, content_s, less * kept, 0.0, 2 * kept),
    }


def shapes_timed(module):
    if module == "vision":
        return [(1, TILE), (4, TILE), (16, TILE)]
    return [(1, 32), (1, 128), (4, 64)]


def model_profile(vision=1.0, llm=1.0, *, degrees=(1, 2), concurrency=8.0, graph="two", tied=()):
    """Times from a formula, in which `vision` and `llm` weigh the modules."""
    layers, edges = GRAPHS[graph]
    weights = {"vision": vision, "llm": llm}
    timings = []
    for module in layers:
        for tp, (rows, tokens) in itertools.product(degrees, shapes_timed(module)):
            f = 1e-4 + 2e-6 * rows * tokens + 1e-8 * rows * tokens**2
            f *= weights.get(module, 1.0) / tp**0.7
            temp = 100.0 * rows * tokens / tp
            timings.append(
                LayerTiming(
                    module, tp, Shape(rows, tokens), f, 2 * f, f, 2 * f, temp / 4,
                    recompute=recompute(f, f, temp, 0.25), output_bytes=temp * tp / 2,
                )
            )  # fmt: skip
    return profile_of(
        timings, layers, layer_bytes=10_000, ends_bytes=5_000, share=0.3,
        piece_tokens={"vision": TILE} if "vision" in layers else {}, concurrency=concurrency,
        task_overhead_s=1e-4, edges=edges, tied=tied, priced_by="a formula",
    )  # fmt: skip


@functools.cache
def data_profile(tiles=True):
    rng = np.random.default_rng(0)
    counts = np.minimum(rng.pareto(1.2, 60) * 2, 9).astype(int) * tiles
    loads = [
        Load({"vision": (TILE,) * int(t), "llm": (int(4 * t + rng.integers(10, 60)),)})
        for t in counts
    ]
    return DataProfile("made up", 60, tuple(loads))


def full_groups(plan, contents, n, together=None):
    """`n` times the groups that go `together` (one of each module that has a shape)."""
    (bucket,) = plan.layout.buckets
    counts = {m: (together or {}).get(m, 1) for m, _ in bucket.shapes}
    first, size = {}, 0
    for m, count in counts.items():
        first[m], size = size, size + count
    groups = []
    for start in range(0, n * size, max(size, 1)):
        for m, shape in bucket.shapes:
            readers = [t for t in plan.layout.targets(m) if t in counts]
            feeds = tuple(start + first[t] + k for t in readers for k in range(counts[t]))
            group = Group(m, shape, feeds, contents[m], microbatches=plan.layout.group_size)
            groups += [group] * counts[m]
    return tuple(groups)


def mean_makespan_s(plan, prices, names, contents, n_groups, together=None):
    """Mean seconds of steps of so many groups, between whole numbers by interpolation."""
    took = {}
    for n in sorted({f(n) for n in n_groups for f in (math.floor, math.ceil)}):
        schedule = Schedule(0, full_groups(plan, contents, n, together))
        took[n] = simulate_step(plan, schedule, prices, names).makespan_s
    return float(np.mean(np.interp(n_groups, list(took), list(took.values()))))


def extent(n_devices, n_layers, *, max_model, max_stage, unstaged=(), patterns=None):
    degrees = dict.fromkeys(n_layers, range(1, max_model + 1))
    patterns = patterns or dict.fromkeys(n_layers, 1)
    config = PlanConfig(max_model=max_model, max_stage=max_stage)
    return SpaceLimits(n_layers, degrees, unstaged, patterns, n_devices, n_devices, config)


def layouts(space, n_devices, n_layers, ends=None, **limits):
    families = space(extent(n_devices, n_layers, **limits))
    return [f.layout(i, n_layers, ends) for f in families for i in range(len(f))]


# Devices of a random case by graph: three modules have many more placements.
DEVICES = {
    "two": [1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 13, 6, 4, 5, 16, 3],
    "apart": [3, 4, 2, 4],
    "chain": [3, 4, 2, 4],
    "taps": [3, 4, 2, 3],
}


def random_case(seed, graph="two"):
    """A profile, data, devices and generator of a seed; so small that all can be tried."""
    rng = np.random.default_rng(seed)
    n_devices = DEVICES[graph][seed % len(DEVICES[graph])]
    layers, edges = GRAPHS[graph]
    timings = []
    for module in layers:
        a, b, c = 10 ** rng.uniform([-5, -6.5, -9], [-4, -5, -8])
        temp, kept = rng.uniform(20, 200, 2)
        pair_s = 10 ** rng.uniform(-9, -8) if seed % 3 == 0 and module != "vision" else 0.0
        for tp in (1, 2):
            for rows, tokens in shapes_timed(module):
                f = (a + b * rows * tokens + c * rows * tokens**2) / tp ** rng.uniform(0.4, 1)
                ends = f * rng.uniform(0, 3)
                size = rows * tokens / tp
                timings.append(
                    LayerTiming(
                        module, tp, Shape(rows, tokens), f, f * rng.uniform(1, 3), ends, 2 * ends,
                        kept * size, {"pair": pair_s / tp}, {"pair": 2 * pair_s / tp},
                        recompute(f, ends, temp * size, 0.2, pair_s / tp),
                        output_bytes=kept * rows * tokens,
                    )
                )  # fmt: skip
    if graph == "two":
        layers = {"vision": int(rng.integers(1, 5)), "llm": int(rng.integers(1, 6))}
    profile = profile_of(
        timings, layers, device="cpu" if seed % 2 else "gpu",
        layer_dims=params({m: int(rng.integers(1_000, 20_000)) for m in layers}),
        ends_dims=params({m: int(rng.integers(0, 20_000)) for m in layers}),
        entry_share={m: float(rng.uniform()) for m in layers}, piece_tokens={"vision": TILE},
        concurrency=float(rng.choice([1.5, n_devices])),
        task_overhead_s=float(10 ** rng.uniform(-6, -4)), edges=edges,
        tied=("llm",) if seed % 4 == 3 else (), host_s=(0.0, 2e-4, 3e-3)[seed % 3],
    )  # fmt: skip
    counts = rng.integers(0, rng.integers(1, 9), 30)
    loads = []
    for t in counts.tolist():
        pieces = {"vision": (TILE,) * t, "llm": (int(4 * t + rng.integers(10, 80)),)}
        if "audio" in layers:  # of any length, several of a sample
            pieces["audio"] = tuple(rng.integers(5, 40, rng.integers(0, 3)).tolist())
        if "generator" in layers:
            pieces["generator"] = tuple(rng.integers(10, 60, rng.integers(0, 2)).tolist())
        loads.append(Load(pieces))
    profile = on(LINKS if seed % 2 else None, profile)
    return profile, DataProfile("random", 30, tuple(loads)), n_devices, rng


def on(hardware, profile):
    return dataclasses.replace(profile, hardware=hardware, computed=hardware is not None)


def prepared(n_devices, profile=None, data=None, config=CONFIG, **asked):
    spec = SearchSpec(n_devices, BATCH, config, **asked)
    return build_evaluator(profile or model_profile(), data or data_profile(), spec)


_SEARCHED: dict[str, SearchResult] = {}


def run(
    policy="dflop", n_devices=3, profile=None, data=None, effort="quick", shard_devices=0,
    loop="any", **options,
):  # fmt: skip
    """A search; equal ones, with the same choice of buckets, are searched once."""
    config = dataclasses.replace(
        CONFIG, policy=policy, effort=effort, shard_devices=shard_devices, loop=loop
    )
    inputs = profile or model_profile(), data or data_profile()
    key = repr((refine_buckets.choose_buckets, inputs, n_devices, config, sorted(options.items())))
    if any(map(callable, options.values())) or key not in _SEARCHED:
        _SEARCHED[key] = search_plan(
            *inputs, n_devices=n_devices, global_batch=BATCH, config=config, **options
        )
    return _SEARCHED[key]
