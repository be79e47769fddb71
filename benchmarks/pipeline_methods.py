"""Orders that others make: interleaved 1F1B, and a tree search of segments' priorities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, Plan, Schedule, Task
from dflop_jax.tasks.graph import StepGraph, resources
from dflop_jax.tasks.listing import listed
from dflop_jax.tasks.numbered import NumberedTasks, starts_of

ROLLOUTS = 10  # of an expansion
_EXPLORE = 0.1  # UCB's constant, for rewards of about 1


def interleaved(
    plan: Plan, schedule: Schedule, graph: StepGraph, problem: NumberedTasks
) -> list[Task] | None:
    """Interleaved 1F1B: every rank has a fixed list. It runs its chunks in turn for as many
    microbatches as there are ranks, warms up with as many of them as the textbook says, then
    alternates forward and backward. A microbatch is a group that feeds none, with those that feed
    it. Where ranks would wait for each other, or memory is short, all warm up as much longer or
    shorter as it takes; None where no warm-up fits into memory.
    """
    of = resources(plan.layout)
    ranks = sorted({of[s.submesh] for s in plan.layout.segments})
    lists = {r: _chunk_lists(plan, schedule, graph, r, len(ranks)) for r in ranks}
    most = max((len(forward) for forward, _ in lists.values()), default=0)
    for longer in sorted(range(-most, most + 1), key=lambda n: (abs(n), n)):
        in_order = []
        for r in ranks:
            chunks = sum(of[s.submesh] == r for s in plan.layout.segments)
            after = len(ranks) - ranks.index(r) - 1
            warm_up = 2 * after + (chunks - 1) * len(ranks) if chunks > 1 else after
            in_order.append([*_alternated(*lists[r], max(0, warm_up + longer))])
        order = _joined(graph, in_order)
        if order is not None and problem.allows([graph.place[t] for t in order]):
            return order
    return None


def _chunk_lists(
    plan: Plan, schedule: Schedule, graph: StepGraph, resource: int, n_ranks: int
) -> tuple[list[list[Task]], list[list[Task]]]:
    """A rank's forward and backward tasks, by chunk and microbatch."""
    of = resources(plan.layout)
    segments = [s for s in plan.layout.segments if of[s.submesh] == resource]
    ends = [i for i, g in enumerate(schedule.groups) if not g.feeds]
    sets = [[e, *(i for i, g in enumerate(schedule.groups) if e in g.feeds)] for e in ends]
    blocks = [sets[i : i + n_ranks] for i in range(0, len(sets), n_ranks)]

    def unit(segment: str, module: str, groups: Sequence[int], direction: str) -> list[Task]:
        mine = (i for i in sorted(groups) if schedule.groups[i].module == module)
        tasks = (Task(segment, i, direction) for i in mine)  # type: ignore[arg-type]
        return [t for t in tasks if t in graph.waits_for]

    def turns(direction: str) -> list[list[Task]]:
        chunks = segments if direction == FORWARD else segments[::-1]
        return [
            unit(s.name, s.module, groups, direction)
            for block in blocks
            for s in chunks
            for groups in block
        ]

    return turns(FORWARD), turns(BACKWARD)


def _alternated(
    forward: list[list[Task]], backward: list[list[Task]], warm_up: int
) -> Iterator[Task]:
    for unit in forward[:warm_up]:
        yield from unit
    rest = forward[warm_up:]
    for i, unit in enumerate(backward):
        yield from chain.from_iterable(rest[i : i + 1])
        yield from unit


def _joined(graph: StepGraph, lists: list[list[Task]]) -> list[Task] | None:
    """One order of all ranks' lists, the tasks that end a step last; None where they wait for each
    other."""
    order: list[Task] = []
    done: set[Task] = set()
    places = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for k, tasks in enumerate(lists):
            while places[k] < len(tasks) and done.issuperset(graph.waits_for[tasks[places[k]]]):
                order.append(tasks[places[k]])
                done.add(tasks[places[k]])
                places[k] += 1
                moved = True
    if any(place < len(tasks) for place, tasks in zip(places, lists)):
        return None
    return [*order, *(t for t in graph.tasks if t.group == NO_GROUP)]


@dataclass
class _Node:
    """Segments placed so far, by class; the rewards of what was tried below."""

    left: tuple[int, ...]
    children: dict[int, _Node] = field(default_factory=dict)
    visits: int = 0
    reward: float = 0.0


def tree_search(
    problem: NumberedTasks, schedule: Schedule, graph: StepGraph, most_orders: int, seed: int = 0
) -> list[int]:
    """The fastest order of `most_orders`, by Monte Carlo tree search of segments' priorities.

    A level of the tree says which segment has the next priority; a segment is a group's forward or
    backward through all ranks, and those of one module, shape and direction keep a fixed order. Of
    a leaf the child of highest UCB is expanded, by `ROLLOUTS` random completions; ranks run two
    queues by turns (`listed(alternate=True)`).
    """
    rng = np.random.default_rng(seed)
    classes: dict[tuple[object, ...], dict[tuple[object, ...], list[int]]] = {}
    for i, t in enumerate(graph.tasks):
        ends = t.group == NO_GROUP
        kind = () if ends else (schedule.groups[t.group].module, schedule.groups[t.group].shape)
        segments = classes.setdefault((*kind, t.direction if kind else "end"), {})
        segments.setdefault((t.group, t.segment if ends else ""), []).append(i)
    members = [list(segments.values()) for segments in classes.values()]
    root = _Node(tuple(len(m) for m in members))
    best: list[int] = []
    scale = least = tried = 0
    while tried < most_orders:
        path, chosen = _descended(root)
        for _ in range(ROLLOUTS):
            rest = np.repeat(np.arange(len(members)), path[-1].left)
            order = listed(
                problem, _keys(problem, members, [*chosen, *rng.permutation(rest)]), alternate=True
            )
            makespan = starts_of(problem, order)[1]
            scale = scale or makespan
            if problem.allows(order) and (not best or makespan < least):
                best, least = order, makespan
            for node in path:
                node.visits += 1
                node.reward += scale / max(makespan, 1)
            tried += 1
    return best


def _descended(root: _Node) -> tuple[list[_Node], list[int]]:
    """The path to the node to try, and the classes chosen on it."""
    path, chosen = [root], []
    while path[-1].visits and any(path[-1].left):
        node = path[-1]
        for c, n in enumerate(node.left):
            if n and c not in node.children:
                left = (*node.left[:c], n - 1, *node.left[c + 1 :])
                node.children[c] = _Node(left)
        log = math.log(node.visits)

        def ucb(c: int, node: _Node = node, log: float = log) -> float:
            child = node.children[c]
            if not child.visits:
                return math.inf
            return child.reward / child.visits + _EXPLORE * math.sqrt(log / child.visits)

        c = max(node.children, key=ucb)
        chosen.append(c)
        path.append(node.children[c])
    return path, chosen


def _keys(
    problem: NumberedTasks, members: list[list[list[int]]], chosen: Sequence[int]
) -> list[int]:
    """The key of each task where segments have priority in this order of their classes."""
    keys, taken = [0] * problem.n, [0] * len(members)
    for key, c in enumerate(chosen):
        for t in members[c][taken[c]]:
            keys[t] = key
        taken[c] += 1
    return keys
