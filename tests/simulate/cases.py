"""Small plans, schedules and prices of module graphs, for the tests of the simulator."""

from __future__ import annotations

import itertools
from dataclasses import replace

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    RETURN,
    SEND,
    UPDATE,
    Bucket,
    Edge,
    Group,
    Layout,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    Scheduling,
    SegmentPlan,
    SendId,
    Shape,
    SubmeshPlan,
    Task,
)
from dflop_jax.simulate.task_graph import segment_links

ONE = Shape(1, 64)  # the shape that every plan here has
TWO = Shape(2, 64)
SHAPES = (ONE, TWO)


def graph(*modules, edges=(), first=None, order="1f1b", **more):
    """A plan of modules "name" or "name:n" of n segments, each on a device of its own or from
    `first`; `edges` are "ab" for an edge from a to b."""
    sizes = [(m.partition(":")[0], int(m.partition(":")[2] or 1)) for m in modules]
    names = [(m, i, n) for m, n in sizes for i in range(n)]
    first = first or range(len(names))
    submeshes = tuple(
        SubmeshPlan(f"{m}{i}", f, 1, 1, 1) for (m, i, _), f in zip(names, first, strict=True)
    )
    segments = tuple(
        SegmentPlan(f"{m}{i}", m, i, i + 1, f"{m}{i}", i == 0, i == n - 1) for m, i, n in names
    )
    joined = tuple(e if isinstance(e, Edge) else Edge(e[0], e[1], f"from_{e[0]}") for e in edges)
    buckets = tuple(Bucket.from_shapes({m: shape for m, _ in sizes}) for shape in SHAPES)
    layout = Layout(submeshes, segments, buckets, joined, **more)
    return Plan("test", layout, Scheduling(order=order))


def chain(n, *, sources=0, order="1f1b", first=None):
    """`n` segments in a row, the first `sources` of a module `a` that a module `b` reads."""
    if not sources:
        return graph(f"b:{n}", order=order, first=first)
    return graph(f"a:{sources}", f"b:{n - sources}", edges=["ab"], order=order, first=first)


def batch(plan, counts, *, shapes=(), step=0):
    """A schedule of groups (`counts` of every module, or by module) of which the k-th of a module
    feeds the k-th of its targets; `shapes` are those of the k-th groups, else ONE."""
    counts = dict.fromkeys(plan.layout.modules, counts) if isinstance(counts, int) else counts
    turns = range(max(counts.values(), default=0))
    listed = [(m, k) for k in turns for m in plan.layout.modules if k < counts[m]]
    place = {key: i for i, key in enumerate(listed)}
    groups = []
    for m, k in listed:
        feeds = tuple(place[t, k] for t in plan.layout.targets(m) if (t, k) in place)
        groups.append(group(m, shapes[k] if k < len(shapes) else ONE, feeds))
    return Schedule(step, tuple(groups))


def group(module, shape=ONE, feeds=(), pairs=0):
    return Group(module, shape, tuple(feeds), (pairs,))


def names(plan):
    return [s.name for s in plan.layout.segments]


def spans_of(trace):
    """(start, end) of every task."""
    events = (e for e in trace.events if e.direction not in (SEND, RETURN))
    return {Task(e.segment, e.group, e.direction): (e.start_s, e.end_s) for e in events}


def alone_s(priced, schedule, task):
    """Seconds of a task that runs alone; 0 if it has no price."""
    if task.group == NO_GROUP:
        return priced.step_end.get(task, 0.0)
    group = schedule.groups[task.group]
    price = priced.programs.get(ProgramId(task.segment, group.shape, task.direction))
    return price.seconds(group.content) if price else 0.0


def prices(plan, seconds, sends=None, concurrency=float("inf")):
    """Prices by hand: `seconds` by (segment, direction[, shape]), `sends` by (source, target,
    direction), at any shape."""
    programs, step_end = {}, {}
    for (segment, direction, *shape), value in seconds.items():
        if direction in (REDUCE, UPDATE):
            step_end[Task(segment, NO_GROUP, direction)] = value
        for s in shape or SHAPES if direction in (FORWARD, BACKWARD) else ():
            programs[ProgramId(segment, s, direction)] = Price(value)
    each = itertools.product((sends or {}).items(), SHAPES)
    priced = {SendId(a, b, shape, d): value for ((a, b, d), value), shape in each}
    return Prices(programs, step_end, priced, concurrency)


def same_prices(plan, forward_s, backward_s, last_s, **more):
    """Every segment alike; those that nothing reads do both in their backward."""
    read = {link.source for link in segment_links(plan.layout)}
    seconds = {}
    for n in names(plan):
        seconds[n, FORWARD] = forward_s
        seconds[n, BACKWARD] = backward_s if n in read else last_s
    return prices(plan, seconds, **more)


GRAPHS = (
    (("b:3",), ()),
    (("a:2", "b:2"), ("ab",)),
    (("a", "b", "c:2"), ("ac", "bc")),
    (("a:2", "b:2", "c"), ("ab", "bc")),
    (("a", "b", "c"), ("ab", "ac", "bc")),
    (("a:3", "b:3"), ("ab", Edge("a", "b", "deep", tap="t", leaves=1, enters=1))),
    (("a", "b", "c"), ("ab", "ac")),  # two modules that nothing reads
)


def random_plan(rng):
    """A graph with meshes of several devices, some shared, some overlapping in part."""
    modules, edges = GRAPHS[int(rng.integers(0, len(GRAPHS)))]
    plan = graph(*modules, edges=edges, order=str(rng.choice(["1f1b", "gpipe"])))
    blocks = ((m.name, *rng.integers((0, 1), (8, 4)).tolist()) for m in plan.layout.submeshes)
    submeshes = tuple(SubmeshPlan(name, first, 1, 1, n) for name, first, n in blocks)
    return plan.with_layout(submeshes=submeshes)


def random_schedule(rng, plan, most=5):
    """Groups of every module, some of which feed a group and some none, several to one."""
    groups = []
    places = {}  # by module; consumers are listed after producers, so feeds are filled in last
    for m in plan.layout.modules:
        n = int(rng.integers(0, most + 1))
        places[m] = list(range(len(groups), len(groups) + n))
        groups += [group(m, SHAPES[int(rng.integers(0, 2))], pairs=int(rng.integers(0, 9)))] * n
    for m in plan.layout.modules:
        for i in places[m]:
            feeds = tuple(
                places[t][int(rng.integers(0, len(places[t])))]
                for t in plan.layout.targets(m)
                if places[t] and rng.random() < 0.9
            )
            groups[i] = replace(groups[i], feeds=feeds)
    return Schedule(int(rng.integers(0, 9)), tuple(groups))


def random_prices(rng, plan, *, sends=False, concurrency=float("inf")):
    """Prices of everything, some of them 0 or absent."""

    def one():
        return float(rng.exponential()) * (rng.random() < 0.9)

    keys = list(itertools.product(SHAPES, (FORWARD, BACKWARD)))
    programs = {
        ProgramId(n, *key): Price(one(), (0.1 * one(),))
        for n, key in itertools.product(names(plan), keys)
        if rng.random() < 0.95
    }
    step_end = {Task(n, NO_GROUP, d): one() for n in names(plan) for d in (REDUCE, UPDATE)}
    priced = {
        SendId(link.source, link.target, *key): float(rng.exponential()) * (rng.random() < 0.7)
        for link, key in itertools.product(segment_links(plan.layout), keys)
    }
    return Prices(programs, step_end, priced if sends else {}, concurrency)


def random_case(rng, **more):
    """(plan, schedule, prices, trainable segments)."""
    plan = random_plan(rng)
    schedule, priced = random_schedule(rng, plan), random_prices(rng, plan, **more)
    trainable = [n for n in names(plan) if rng.random() < 0.8] or names(plan)[-1:]
    return plan, schedule, priced, trainable
