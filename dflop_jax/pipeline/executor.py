"""Runs a plan: compiles every program ahead, then dispatches each step's tasks in one order.

One thread dispatches everything asynchronously, in the order of `pipeline.order`; arrays are the
only synchronisation. After `compile` and `calibrate` a step compiles nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax

from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.pipeline.communicator import Communicator, absent, zeros
from dflop_jax.pipeline.order import resources
from dflop_jax.pipeline.programs import GroupArrays, Programs
from dflop_jax.pipeline.segment import Segment
from dflop_jax.pipeline.step import State, StepCall, StepHandle
from dflop_jax.pipeline.watcher import Observation, Watcher
from dflop_jax.records import REDUCE, UPDATE, Plan, Task


class Executor:
    """A model's parameters and optimizer state on their submeshes, and the programs on them.

    Args:
      tx: the optimizer; clipping to `clip_norm` (0: off) by the norm over all segments is ours.
      freeze: names from the modules' `freeze_groups`.
      rate_factors: freeze group -> what its steps are multiplied by: its learning rate over that of
        `tx`. Groups that are not named have that of `tx`.
      evaluates: also compile the forward program of the LLM's end, for `run_evaluation`.

    Raises:
      ValueError: the plan does not fit the model or the devices, or `freeze` is wrong.
    """

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        tx: optax.GradientTransformation,
        *,
        devices: list[jax.Device] | None = None,
        clip_norm: float = 0.0,
        freeze: tuple[str, ...] = (),
        rate_factors: Mapping[str, float] | None = None,
        evaluates: bool = False,
    ):
        self.model, self.plan = model, plan
        self.programs = Programs(
            model,
            plan,
            tx,
            devices=list(jax.devices()) if devices is None else devices,
            clip_norm=clip_norm,
            freeze=freeze,
            rate_factors=rate_factors or {},
            evaluates=evaluates,
        )
        self.trainable = self.programs.trainable
        self.communicator = Communicator()
        self.state = State()
        # Called before the first update of a step, which donates the state.
        self.before_update: Callable[[], None] = lambda: None
        # Called after each task of a step is dispatched, on every process in the same order.
        self.after_task: Callable[[], None] = lambda: None
        self._watcher = Watcher(set(resources(plan).values()))
        self._free_s: dict[int, float] = {}
        self._throttled = self._crowded_resources()
        # Await every task, everywhere: on CPU a collective between processes, which holds a thread
        # until all are there, and transfers under way can take each other's threads.
        self.one_at_a_time = any(
            len({d.process_index for d in s.mesh.devices.flat}) > 1
            and s.mesh.devices.flat[0].platform == "cpu"
            for s in self.programs.segments.values()
        )
        self._latest: dict[int, Observation] = {}

    def init(
        self,
        seed: int,
        begin: Callable[[Segment, Callable[[], Params]], Params] | None = None,
    ) -> None:
        """Fresh parameters, optimizer state and zero gradients; the same for any plan. `begin`, if
        given, makes a segment's parameters; it may call for the fresh ones."""
        modules = list(self.model.modules)
        for name, s in self.programs.segments.items():
            if name not in self.programs.local:
                self._init_absent(name)
                continue
            # rbg compiles several times faster than threefry on CPU.
            root = jax.random.key(seed, impl="rbg")
            key = jax.random.fold_in(root, modules.index(s.plan.module))
            fresh = partial(s.init, key)
            self.state.params[name] = begin(s, fresh) if begin else fresh()
            if name in self.trainable:
                u = self.programs.updates[name]
                self.state.opt_state[name] = u.init_state(self.state.params[name])
                self.state.grads[name] = jax.tree.map(zeros, s.grad_structs())

    def _init_absent(self, name: str) -> None:
        """A segment of other processes: its state without a piece of it."""
        s = self.programs.segments[name]
        self.state.params[name] = jax.tree.map(absent, s.placed_structs())
        if name in self.trainable:
            states = self.programs.updates[name].state_structs
            self.state.opt_state[name] = jax.tree.map(absent, states)
            self.state.grads[name] = jax.tree.map(absent, s.grad_structs())

    def compile(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        sync: Callable[[], None] = lambda: None,
    ) -> int:
        """Compile every program of the plan that runs on this process; returns how many. `sync`
        waits for the other processes."""
        return self.programs.compile(on_progress, sync)

    def run_step(self, step: int, groups: Sequence[GroupArrays], scale: float) -> StepHandle:
        """Dispatch a training step; `scale` multiplies every token's loss. Does not wait."""
        return self._run(step, groups, scale, evaluate=False)

    def run_evaluation(self, groups: Sequence[GroupArrays]) -> StepHandle:
        """Dispatch the forward tasks of a batch: the same sums, no gradient."""
        return self._run(-1, groups, 1.0, evaluate=True)

    def _call(self, groups: Sequence[GroupArrays], scale: float) -> StepCall:
        return StepCall(self.programs, self.state, self.communicator, groups, scale)

    def _run(
        self, step: int, groups: Sequence[GroupArrays], scale: float, *, evaluate: bool
    ) -> StepHandle:
        graph, order = self.programs.order([g.bucket for g in groups], evaluate)
        call = self._call(groups, scale)
        seen: dict[int, Observation] = {}
        for i, task in enumerate(order):
            if task.direction == UPDATE:
                self.before_update()
            if task.segment not in self.programs.local:
                call.run(task)  # only its transfers
                self.after_task()
                continue
            resource = self.programs.resource[task.segment]
            if resource in self._throttled and resource in self._latest:
                self._latest[resource].done.wait()
            dispatched_s = time.perf_counter()
            outputs = call.run(task)
            seen[i] = self._watcher.watch(resource, task, dispatched_s, outputs)
            self._latest[resource] = seen[i]
            if self.one_at_a_time:
                seen[i].done.wait()
                call.settle()
            self.after_task()
        return StepHandle(step, call, graph, order, seen, self._free_s)

    def _crowded_resources(self) -> frozenset[int]:
        """Resources of several CPU devices of one process.

        Their collectives block threads of one pool that has a thread per device, so two programs
        in flight on the same devices can wait for each other's threads for ever. They run one task
        at a time; real accelerators queue as many as there are.
        """
        programs = self.programs
        return frozenset(
            programs.resource[name]
            for name, s in programs.segments.items()
            if s.mesh.size > 1 and s.mesh.devices.flat[0].platform == "cpu"
        )

    def calibrate(
        self, repeats: int = 3, sync: Callable[[], None] = lambda: None
    ) -> dict[Task, float]:
        """Seconds of each (segment, bucket, direction) on this process, a task whose `group` is
        the bucket index.

        Runs every program on empty microbatches, alone and awaited: gradients stay zero. It also
        warms up every transfer, so that steps compile nothing. Minimum of `repeats` runs. `sync`
        waits for the other processes, before every task.
        """
        times: dict[Task, float] = {}
        for b in range(len(self.plan.buckets)):
            group = self.programs.empty_group(b)
            for evaluate in (False, True) if self.programs.evaluates else (False,):
                _, order = self.programs.order([b], evaluate)
                for _ in range(repeats):
                    self._time_tasks(order, group, times, sync)
        # The norms' transfers, which only a whole step would make.
        for name in self.trainable:
            here = self.programs.segments[name].sharding()
            norm = zeros(jax.ShapeDtypeStruct((), jnp.float32, sharding=here))
            for other in self.trainable:
                there = self.programs.segments[other].sharding()
                jax.block_until_ready(self.communicator.send(norm, there))
        return times

    def _time_tasks(
        self,
        order: Sequence[Task],
        group: GroupArrays,
        times: dict[Task, float],
        sync: Callable[[], None],
    ) -> None:
        call = self._call([group], 0.0)
        for task in order:
            if task.direction in (REDUCE, UPDATE):
                continue
            call.settle()
            sync()
            start = time.perf_counter()
            jax.block_until_ready(call.run(task))
            took = time.perf_counter() - start
            if task.segment not in self.programs.local:
                continue
            key = Task(task.segment, group.bucket, task.direction)
            times[key] = min(took, times.get(key, took))

    def close(self) -> None:
        """End the observing threads."""
        self._watcher.close()
