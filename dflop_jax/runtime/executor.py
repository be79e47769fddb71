"""Runs a plan: compiles every program ahead of the first step, then dispatches tasks in order.

One thread dispatches all tasks asynchronously, in the step's order; tasks synchronise only through
their arrays. After `compile` and `calibrate` a step compiles nothing.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.records import UPDATE, Plan, Schedule, Task
from dflop_jax.runtime.calibration import Calibration, Sync, calibrate, rehearse
from dflop_jax.runtime.communicator import remote_array
from dflop_jax.runtime.compiling import compile_programs
from dflop_jax.runtime.initial_state import draw_parameters, zero_gradients
from dflop_jax.runtime.module_parts import KEY_IMPL
from dflop_jax.runtime.parameter_layout import grad_structs, owned_param_structs
from dflop_jax.runtime.programs import GroupArrays, make_programs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.step import StepCall, TrainState
from dflop_jax.runtime.step_result import Observation, PendingTasks, StepHandle, Watcher
from dflop_jax.runtime.update import Optimizer
from dflop_jax.simulate.task_graph import StepGraph, feeding_groups, step_graph
from dflop_jax.simulate.task_order import schedule_order


def _no_sync() -> None:
    """Do nothing: the `sync` of a single process."""


class Executor:
    """A model's parameters and optimizer state on their submeshes, and the programs that use them.

    `training`: arguments of `make_programs`; `run_evaluation` needs `evaluates=True`.
    `before_update` is called before the first update of a step, which donates the state.

    Raises:
      ValueError: the plan does not fit the model or the devices, or `freeze` is wrong.
    """

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        tx: Optimizer,
        *,
        devices: list[jax.Device] | None = None,
        **training: Any,
    ):
        self.model, self.plan = model, plan
        all_devices = list(jax.devices()) if devices is None else devices
        self.programs = make_programs(model, plan.layout, all_devices, tx, **training)
        self.trainable = tuple(self.programs.updates)
        self.state = TrainState()
        self.before_update: Callable[[], None] = lambda: None
        self.pending_tasks = PendingTasks()
        self._watcher = Watcher(set(self.programs.resource_of.values()))
        self._free_s: dict[int, float] = {}
        # Resources of several CPU devices run one task at a time; accelerators queue tasks.
        self._throttled = {self.programs.resource_of[n] for n in self.programs.serial_segments}
        # Wait for every task on every process: on CPU, a collective between processes blocks a
        # thread until all processes have arrived, and pending transfers could need that thread.
        self.one_at_a_time = any(
            s.is_on_cpu and len({d.process_index for d in s.mesh.devices.flat}) > 1
            for s in self.programs.segments.values()
        )
        self._latest: dict[int, Observation] = {}

    def replace_plan(self, plan: Plan) -> None:
        """Use another plan of the same layout, which may order steps differently."""
        assert plan.layout == self.plan.layout, "the programs were compiled for another layout"
        self.plan = plan

    @property
    def awaited(self) -> frozenset[str]:
        """Submeshes whose tasks are dispatched one at a time."""
        return frozenset(
            self.programs.submesh_of[name]
            for name, resource in self.programs.resource_of.items()
            if self.one_at_a_time or resource in self._throttled
        )

    def init(
        self,
        seed: int,
        make_params: Callable[[Segment, Callable[[], Params]], Params] | None = None,
        sync: Sync = _no_sync,
    ) -> None:
        """Make fresh parameters, optimizer state and zero gradients, which are the same for any
        plan. If given, `make_params(segment, draw)` makes a segment's parameters; `draw()` returns
        the fresh ones. `sync` waits for the other processes before anything is sent to them."""
        self.init_for_restore()
        modules, state = list(self.model.modules), self.state
        for name, s in self.programs.segments.items():
            if name not in self.programs.local_segments:
                continue
            root = jax.random.key(seed, impl=KEY_IMPL)
            key = jax.random.fold_in(root, modules.index(s.plan.module))
            draw = partial(draw_parameters, s, key)
            params = make_params(s, draw) if make_params else draw()
            if name in self.trainable:
                made = self.programs.updates[name].init_state(params)
                params, state.masters[name], state.opt_state[name] = made
            state.params[name] = params
        sync()
        self.share_tied()

    def init_for_restore(self) -> None:
        """Make zero gradients, and empty state of other processes; a checkpoint brings the rest."""
        for name, s in self.programs.segments.items():
            update = self.programs.updates.get(name)
            if name in self.programs.local_segments:
                if update:
                    self.state.grads[name] = zero_gradients(s)
                continue
            self.state.params[name] = jax.tree.map(remote_array, owned_param_structs(s))
            if update:
                self.state.masters[name] = jax.tree.map(remote_array, update.master_structs)
                self.state.opt_state[name] = jax.tree.map(remote_array, update.state_structs)
                self.state.grads[name] = jax.tree.map(remote_array, grad_structs(s))

    def share_tied(self) -> None:
        """Send tied parameters to the segments that read them, after `init` or a restore."""
        for reader in self.programs.owner_of:
            self.state.share_tied(self.programs, reader)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Make programs read the moving average, if any. Memory must hold both; no step may run."""
        params = dict(self.state.params)
        for name, update in self.programs.updates.items():
            average = update.averaged(self.state.opt_state[name])
            self.state.params[name] = {**params[name], **average}
        self.share_tied()
        try:
            yield
        finally:
            self.state.params.update(params)
            self.share_tied()

    def compile(
        self, on_progress: Callable[[int, int], None] = lambda *_: None, sync: Sync = _no_sync
    ) -> int:
        """Compile every program of this process; return their number."""
        return compile_programs(self.programs, on_progress, sync)

    def run_evaluation(self, schedule: Schedule, arrays: Sequence[GroupArrays]) -> StepHandle:
        """Dispatch the forward tasks of a batch, which give sums of losses and no gradients."""
        return self.run_step(replace(schedule, order=()), arrays, {}, evaluate=True)

    def run_step(
        self,
        schedule: Schedule,
        arrays: Sequence[GroupArrays],
        scales: Mapping[str, float],
        *,
        norm_limit: float = math.inf,
        evaluate: bool = False,
    ) -> StepHandle:
        """Dispatch a training step without waiting for it. `arrays` belong to the schedule's
        groups, `scales` multiply the token losses by module. If the global gradient norm is above
        `norm_limit` or not finite, parameters and optimizer state do not change.

        Raises:
          ValueError: the schedule's order does not have exactly the step's tasks, or a group
            exchanges features with more groups than the plan's `fan_in`.
        """
        graph, order = self._ordered(schedule, evaluate=evaluate)
        call = StepCall(
            self.programs,
            self.state,
            schedule.groups,
            arrays,
            scales,
            norm_limit=norm_limit,
            evaluate=evaluate,
        )
        observations: dict[int, Observation] = {}
        self.pending_tasks.dispatch(order, observations)
        for i, task in enumerate(order):
            self.pending_tasks.n_started = i + 1
            if task.direction == UPDATE:
                self.before_update()
            if task.segment not in self.programs.local_segments:
                call.run(task)  # runs elsewhere: only its transfers
                continue
            resource = self.programs.resource_of[task.segment]
            if resource in self._throttled and resource in self._latest:
                self._latest[resource].done.wait()
            dispatched_s = time.perf_counter()
            observations[i] = self._watcher.watch(resource, dispatched_s, call.run(task))
            self._latest[resource] = observations[i]
            if self.one_at_a_time:
                observations[i].done.wait()
                call.wait_for_pending()
        return StepHandle(schedule.step, call, graph, order, observations, self._free_s)

    def _ordered(
        self, schedule: Schedule, *, evaluate: bool = False
    ) -> tuple[StepGraph, tuple[Task, ...]]:
        layout, groups = self.plan.layout, schedule.groups
        reading = Counter((i, groups[f].module) for i, g in enumerate(groups) for f in g.feeds)
        max_fan_in = max([*map(len, feeding_groups(groups).values()), *reading.values()], default=0)
        if max_fan_in > layout.fan_in:
            raise ValueError(
                f"step {schedule.step}: {max_fan_in} groups of a module feed or read one group, "
                f"the plan allows {layout.fan_in}; raise the plan's fan_in"
            )
        graph = step_graph(layout, groups, self.trainable, evaluate=evaluate)
        return graph, schedule_order(self.plan, schedule, graph)

    def calibrate(self, repeats: int, sync: Sync = _no_sync, *, ends: bool = False) -> Calibration:
        """Time every program alone on this process; see `runtime.calibration`."""
        return calibrate(self.programs, self.state, repeats=repeats, ends=ends, sync=sync)

    def rehearse(
        self, schedule: Schedule, sync: Sync = _no_sync, *, with_updates: bool = True
    ) -> None:
        """Run a step on synthetic arrays to test whether it fits into memory. Updates change
        parameters and optimizer state."""
        _, order = self._ordered(schedule)
        order = tuple(t for t in order if with_updates or t.direction != UPDATE)
        rehearse(self.programs, self.state, schedule.groups, order, sync)

    def close(self) -> None:
        """Stop the threads that observe tasks."""
        self._watcher.close()
