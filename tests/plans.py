"""Small plans, groups and prices, for the tests of order, simulation, costs and search."""

from __future__ import annotations

from dataclasses import replace

from dflop_jax.contract import edges_of
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    DataProfile,
    Edge,
    LayerTiming,
    Layout,
    Load,
    ModelProfile,
    ParamDims,
    Plan,
    Price,
    Profile,
    ProgramId,
    Recompute,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)

TILE_TOKENS = 16  # of a tile in the model "nano"
EDGE = Edge("vision", "llm", "visual")


def bucket(tiles: int, tokens: int, rows: int = 1) -> Bucket:
    """Shapes of an encoder's tiles and of rows of text."""
    vision = Shape(tiles, TILE_TOKENS) if tiles else None
    return Bucket.from_shapes({"vision": vision, "llm": Shape(rows, tokens)})


def load(tiles: int, tokens: int) -> Load:
    """A sample of tiles and of `tokens` tokens of text and pictures."""
    return Load({"vision": (TILE_TOKENS,) * tiles, "llm": (tokens,)})


def chain(
    n: int, *, vision: int = 0, order: str = "1f1b", tiles: int = 4, first: tuple[int, ...] = ()
) -> Plan:
    """`n` segments in a row, the first `vision` of the encoder, each on a device of its own or from
    `first`. Bucket 1 has no tiles, and without an encoder longer rows than bucket 0."""
    first = first or tuple(range(n))
    names = [f"v{i}" if i < vision else f"l{i - vision}" for i in range(n)]
    segments = []
    for i, name in enumerate(names):
        start, stop = (0, vision) if i < vision else (vision, n)
        module = "vision" if i < vision else "llm"
        k = i - start
        segments.append(SegmentPlan(name, module, k, k + 1, name, i == start, i == stop - 1))
    submeshes = tuple(SubmeshPlan(m, f, 1, 1, 1) for m, f in zip(names, first, strict=True))
    buckets = (bucket(tiles, 64), bucket(0, 64)) if vision else (bucket(0, 64), bucket(0, 128))
    edges = (EDGE,) if 0 < vision < n else ()
    return Plan(
        "test", Layout(submeshes, tuple(segments), buckets, edges=edges), Scheduling(order=order)
    )


def graph_plan(model, parts_of, shapes, **more) -> Plan:
    """A plan of a model's modules, of every segment (last layer + 1, first device[, (stage, data,
    model)[, recompute policy]])."""
    submeshes, segments = [], []
    for module, parts in parts_of.items():
        start = 0
        for i, (stop, first, *rest) in enumerate(parts):
            name, (mesh, remat) = f"{module}{i}", (*rest, *((1, 1, 1), "none")[len(rest) :])
            submeshes.append(SubmeshPlan(name, first, *mesh))
            ends = i == 0, i == len(parts) - 1
            segments.append(SegmentPlan(name, module, start, stop, name, *ends, remat))
            start = stop
    given = {}
    if model is not None:
        tied = tuple(m for m, module in model.modules.items() if module.tied)
        stages = max(m.stage for m in submeshes)
        given = {"edges": edges_of(model), "group_size": stages, "tied": tied}
    buckets = (Bucket.from_shapes(shapes),)
    return Plan("test", Layout(tuple(submeshes), tuple(segments), buckets, **(given | more)))


def programs(plan: Plan, forward_s: float = 1.0, backward_s: float = 2.0) -> dict[ProgramId, Price]:
    """The same price for every segment and shape."""
    return {
        ProgramId(s.name, shape, direction): Price(seconds)
        for s in plan.layout.segments
        for shape in plan.layout.shapes(s.module)
        for direction, seconds in ((FORWARD, forward_s), (BACKWARD, backward_s))
    }


# The model "nano" on two devices, and a profile that was never measured.
NANO_LAYERS = {"vision": 2, "llm": 4}
NANO = Plan(
    "dflop",
    Layout(
        tuple(SubmeshPlan(m, i, 1, 1, 1) for i, m in enumerate(NANO_LAYERS)),
        tuple(SegmentPlan(m, m, 0, n, m, True, True) for m, n in NANO_LAYERS.items()),
        (bucket(16, 256), bucket(8, 128)), edges=(EDGE,), tied=("llm",),
    ),
)  # fmt: skip


def params(n_bytes, *, half=False):
    """By module a parameter of so many bytes in float32, which tensor parallelism splits."""
    working_bytes = 2 if half else 4
    return {m: (ParamDims((n // 4,), 0, working_bytes=working_bytes),) for m, n in n_bytes.items()}


def profile_of(timings, n_layers, *, layer_bytes=1000, ends_bytes=1000, share=0.5, half=False,
               **fields):  # fmt: skip
    """A made-up profile of these timings; modules are alike in what is not given."""
    given = {
        "key": "k", "device": "cpu", "concurrency": 1.0, "n_layers": dict(n_layers),
        "layer_dims": params(dict.fromkeys(n_layers, layer_bytes), half=half),
        "ends_dims": params(dict.fromkeys(n_layers, ends_bytes), half=half),
        "entry_share": dict.fromkeys(n_layers, share),
    }  # fmt: skip
    return ModelProfile(timings=tuple(timings), **(given | fields))


def halved(profile):
    """The profile with parameters that programs read in bfloat16."""
    dims = {
        name: {m: tuple(replace(p, working_bytes=2) for p in every) for m, every in of_all.items()}
        for name, of_all in (("layer_dims", profile.layer_dims), ("ends_dims", profile.ends_dims))
    }
    return replace(profile, **dims)


def group_s(costs, segment, mesh, group_size, rows, tokens, direction):
    """Seconds of a segment's task at per-rank shapes."""
    predictions = costs.predict(segment.module, mesh.model, rows, tokens)
    alone = costs.segment(replace(segment, zero=1), mesh)  # data ranks share nothing
    return alone.task_s(group_size, predictions, direction)


def segment_bytes(costs, segment, mesh, group_size, rows, tokens, **options):
    """`SegmentBytes` of a segment at per-rank shapes."""
    predictions = costs.predict(segment.module, mesh.model, rows, tokens)
    options = {"trained": True, "backward": True} | options
    return costs.segment(segment, mesh).n_bytes(group_size, predictions, **options)


def nano_profile():
    """Made up, with times in proportion to size: good enough to plan with."""
    recompute = {"none": Recompute(), "dots": Recompute()}
    shapes = [("vision", Shape(n, TILE_TOKENS)) for n in (1, 8)]
    shapes += [("llm", Shape(1, n)) for n in (64, 256)]
    timings = [
        LayerTiming(m, 1, s, *(1e-6 * s.size * k for k in (1, 3, 1, 3)), recompute=recompute)
        for m, s in shapes
    ]
    tiles = {"vision": TILE_TOKENS}
    model = profile_of(timings, NANO_LAYERS, edges=(EDGE,), tied=("llm",), piece_tokens=tiles)
    loads = tuple(load(t, 60 + 4 * t) for t in (0, 1, 2, 3, 4))
    return Profile(model, DataProfile("made up", 5, loads))
