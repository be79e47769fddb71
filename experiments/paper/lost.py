"""Where the devices' peak goes that OrchMLLM's plans do not reach, as shares that add up to all.

Command:  python -m experiments.paper --only lost
Paper:    84B on 2,560 H100 at 41.6% MFU; where the rest goes is not said
"""

from __future__ import annotations

from collections.abc import Sequence

from dflop_jax.plan.options import Option, options_of, with_options
from dflop_jax.records import NO_GROUP, REDUCE, UPDATE, Plan, ProgramId, Task
from experiments.paper.answers import Answer, answer, padding
from experiments.paper.cases import Case, Step
from experiments.paper.costs import prices_of
from experiments.paper.orch import CASES
from experiments.paper.results import Result
from experiments.paper.work import mfu

NEEDED, KERNELS, PADDED, FILL = "needed", "kernels below the peak", "padding", "loops that fill"
AGAIN, SHARED, END, IDLE = "computed again", "parameters on their way", "step's end", "idle"
PARTS = (NEEDED, KERNELS, PADDED, FILL, AGAIN, SHARED, END, IDLE)


def parts(case: Case, made: Answer) -> dict[str, float]:
    """Shares of the devices' time in a step, in the order of `PARTS`: what the needed FLOPs take at
    the peak, and what of the rest goes where. Programs are priced again with nothing recomputed,
    and then with nothing shared by data ranks; what is left of them above the needed is kernels."""
    assert made.plan is not None, made.words
    plan = made.plan
    options = options_of(plan.layout)
    keeping = {m: Option("none", o.zero, o.shard_devices) for m, o in options.items()}
    kept = with_options(plan, keeping)
    whole = with_options(plan, dict.fromkeys(options, Option()))
    n_devices, step_s = plan.layout.n_devices, made.step_s

    def share(device_s: float) -> float:
        return device_s / (n_devices * step_s)

    computing = 1 - made.idle_share
    kept_s, whole_s = (_device_s(case, p, made.steps) for p in (kept, whole))
    padded = padding(case, made)
    fill_s = {m: whole_s[m] * _fill(plan, m) for m in whole_s}
    end = share(_end_s(case, plan))
    found = {
        NEEDED: mfu(case, step_s),
        PADDED: share(sum((whole_s[m] - fill_s[m]) * padded[m] for m in whole_s)),
        FILL: share(sum(fill_s.values())),
        AGAIN: computing - share(sum(kept_s.values())),
        SHARED: share(sum(kept_s.values()) - sum(whole_s.values())),
        END: end,
        IDLE: made.idle_share - end,
    }
    found[KERNELS] = 1 - sum(found.values())
    return {name: found[name] for name in PARTS}


def _device_s(case: Case, plan: Plan, steps: Sequence[Step]) -> dict[str, float]:
    """By module seconds that all devices together compute in a step, on average."""
    prices, seconds = prices_of(case, plan).programs, dict.fromkeys(plan.layout.modules, 0.0)
    for step in steps:
        for task in step.schedule.order:
            if task.group == NO_GROUP:
                continue
            segment = plan.layout.segment(task.segment)
            group = step.schedule.groups[task.group]
            price = prices[ProgramId(task.segment, group.shape, task.direction)]
            n_devices = plan.layout.submesh(segment.submesh).n_devices
            seconds[segment.module] += n_devices * price.of(group.content) / len(steps)
    return seconds


def _end_s(case: Case, plan: Plan) -> float:
    """Seconds that all devices together reduce and update in a step."""
    end = prices_of(case, plan).step_end
    return sum(
        plan.layout.submesh(s.submesh).n_devices * end.get(Task(s.name, NO_GROUP, d), 0.0)
        for s in plan.layout.segments
        for d in (REDUCE, UPDATE)
    )


def _fill(plan: Plan, module: str) -> float:
    """Share of a module's ticks in which a loop of stages fills and drains."""
    segment = plan.layout.segments_of(module)[0]
    stages = plan.layout.submesh(segment.submesh).stage
    size = plan.layout.group_size
    return 1 - segment.ticks(1, size) / segment.ticks(stages, size)


def run(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "lost",
        "OrchMLLM: where the devices' time goes, in % of all",
        "84B: 41.6% MFU; the rest is not taken apart",
        ("model", "plan", *PARTS),
        unit="% of the devices' time",
    )
    for case in cases:
        made = answer(case, "orch")
        found = parts(case, made)
        cells = [made.words, *(f"{round(100 * x, 1) + 0.0:.1f}" for x in found.values())]
        result.add(case.name, cells, **{name: 100 * x for name, x in found.items()})
    result.notes += [
        f"{NEEDED}: FLOPs of the samples at the peak, which is the MFU; {KERNELS}: what programs "
        "take longer than their FLOPs at the peak, collectives of tensor parallelism among it",
        f"{SHARED}: what ZeRO gathers and scatters beyond what computing hides; {IDLE}: waits for "
        "other ranks' longer batches and other modules",
    ]
    return result
