"""Dispatch order of a step's tasks: list scheduling that generalizes 1F1B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Group, Plan, Schedule, Task
from dflop_jax.simulate.numbered_tasks import StepTasks, list_schedule, number_tasks
from dflop_jax.simulate.task_graph import StepGraph, in_flight_changes

_TEXTBOOK_TICKS = {FORWARD: 1, BACKWARD: 2, REDUCE: 0, UPDATE: 0}


def order_tasks(plan: Plan, graph: StepGraph, groups: Sequence[Group]) -> tuple[Task, ...]:
    """Return a total order in which a step's tasks are dispatched; resources run tasks in order.

    Uses list scheduling with a backward as long as two forwards. A free resource takes the ready
    forward of the deepest segment below its limit of groups in flight ("1f1b"; "gpipe" has no
    limit), else the ready backward of the earliest group. Groups are ordered by the group at the
    end of the pipeline that they feed. Ties are broken by (this order, group, segment).
    """
    return tuple(graph.tasks[t] for t in textbook_order(plan, graph, groups))


def textbook_order(plan: Plan, graph: StepGraph, groups: Sequence[Group]) -> list[int]:
    """Return `order_tasks` as indices of tasks."""
    tasks = _number_tasks(plan, graph, groups, lambda _: 0.0)
    return list_schedule(_with_textbook_ticks(tasks, graph), _priority_ranks(plan, graph, groups))


def list_schedules(
    plan: Plan, graph: StepGraph, groups: Sequence[Group], seconds: Callable[[Task], float]
) -> tuple[list[int], list[int]]:
    """Return `textbook_order`, and the same list schedule with the `seconds` of each task."""
    tasks = _number_tasks(plan, graph, groups, seconds)
    ranks = _priority_ranks(plan, graph, groups)
    textbook = list_schedule(_with_textbook_ticks(tasks, graph), ranks)
    return textbook, list_schedule(tasks, ranks)


def _number_tasks(
    plan: Plan, graph: StepGraph, groups: Sequence[Group], seconds: Callable[[Task], float]
) -> StepTasks:
    """Return the numbered tasks, without limits of groups in flight under "gpipe"."""
    tasks = number_tasks(plan, graph, groups, seconds)
    if plan.scheduling.order == "gpipe":
        tasks = replace(tasks, max_live=(len(groups) + 1,) * len(tasks.max_live))
    return tasks


def _with_textbook_ticks(tasks: StepTasks, graph: StepGraph) -> StepTasks:
    return replace(tasks, ticks=tuple(_TEXTBOOK_TICKS[t.direction] for t in graph.tasks))


def _priority_ranks(plan: Plan, graph: StepGraph, groups: Sequence[Group]) -> list[int]:
    """Return the priority rank of every task, 0 is the most urgent."""
    depth = {s.name: i for i, s in enumerate(plan.layout.segments)}
    turn_of_group: dict[int, int] = {}

    def turn(i: int) -> int:
        """Return the first group at the end of the pipeline that a group feeds."""
        if i not in turn_of_group:
            turn_of_group[i] = min((turn(f) for f in groups[i].feeds), default=i)
        return turn_of_group[i]

    runs_back = {t.segment for t in graph.tasks if t.direction == BACKWARD}
    # A forward without a backward has no limit in flight, so it gets low priority.
    kinds = {FORWARD: 0, BACKWARD: 1, REDUCE: 3, UPDATE: 4}

    def key(i: int) -> tuple[int, ...]:
        task = graph.tasks[i]
        kind, deeper = kinds[task.direction], -depth[task.segment]
        if task.direction == FORWARD and task.segment not in runs_back:
            kind = 2 * (plan.scheduling.order != "gpipe")
        group_turn = turn(task.group) if task.group >= 0 else 0
        if kind == 1:
            return kind, group_turn, task.group, deeper
        return kind, deeper, group_turn, task.group

    ranks = [0] * len(graph.tasks)
    for rank, i in enumerate(sorted(range(len(graph.tasks)), key=key)):
        ranks[i] = rank
    return ranks


def check_order(graph: StepGraph, order: Sequence[Task]) -> None:
    """Raise ValueError unless `order` has each task of the graph once, after its inputs."""
    done: set[Task] = set()
    for t in order:
        if t not in graph.waits_for or t in done:
            raise ValueError(f"the order runs {t} twice, or it is not a task of this step")
        unmet = [d for d in graph.waits_for[t] if d not in done]
        if unmet:
            raise ValueError(f"the order runs {t} before its input {unmet[0]}")
        done.add(t)
    if len(done) < len(graph.tasks):
        missing = next(t for t in graph.tasks if t not in done)
        raise ValueError(f"the order lacks {missing}; it has {len(done)} of {len(graph.tasks)}")


def schedule_order(plan: Plan, schedule: Schedule, graph: StepGraph) -> tuple[Task, ...]:
    """Return the schedule's order after a check against the graph, or `order_tasks` if none."""
    if schedule.order:
        check_order(graph, schedule.order)
        return schedule.order
    return order_tasks(plan, graph, schedule.groups)


def peak_groups_in_flight(order: Sequence[Task]) -> dict[str, int]:
    """Return each segment's maximum groups in flight; a loss counts its current group."""
    live: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for t, change in zip(order, in_flight_changes(order), strict=True):
        is_loss = t.direction == BACKWARD and not change
        live[t.segment] += change
        peak[t.segment] = max(peak[t.segment], live[t.segment] + is_loss)
    return dict(peak)
