"""What compiling a plan's programs told: frozen records, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program, per device.

    Attributes:
      name: in words, unique in its plan.
      segment: on whose submesh it runs; `kind` its task, "exchange" or "sum".
      mesh: sizes of its submesh's axes.
      keeping: whether it is of its segment's second recompute policy.
      same_as: program of equal text that was compiled before it, in this plan or another.
      compile_s: seconds of XLA; 0 where `same_as` is given.
      handed_bytes: of its outputs, what a forward task leaves for its backward task.
      needed_flops: see `needed`; 0 of programs that compute no layer, whose ratio is None.
      collectives: bytes in one run, by kind.
      pair_arrays: of a task, see `hlo_text`.
      unknown: loops of unknown length and kernels whose FLOPs nobody knows, which are missing.
      error: why it could not be compiled, in a line; the figures are then 0.
    """

    name: str
    segment: str
    submesh: str
    kind: str
    mesh: tuple[int, ...]
    keeping: bool = False
    same_as: str = ""
    compile_s: float = 0.0
    argument_bytes: float = 0.0
    output_bytes: float = 0.0
    handed_bytes: float = 0.0
    aliased_bytes: float = 0.0
    temp_bytes: float = 0.0
    flops: float = 0.0
    needed_flops: float = 0.0
    executed_over_needed: float | None = None
    float32_dot_flops: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)
    pair_arrays: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    error: str = ""

    @property
    def work_bytes(self) -> float:
        """What the program takes beside its arguments while it runs."""
        return self.temp_bytes + self.output_bytes - self.aliased_bytes


@dataclass(frozen=True)
class SegmentState:
    """What a segment holds on one device between programs.

    Attributes:
      state_bytes: parameters, gradients and optimizer state.
      input_bytes: the input of one group in flight, of the largest shape.
      in_flight: groups whose inputs are held at once.
      shard_bytes: reduced gradients, from REDUCE to UPDATE.
      remat, zero: its recompute policy and ZeRO degree.
    """

    segment: str
    submesh: str
    resource: int
    state_bytes: float
    input_bytes: float
    in_flight: int
    shard_bytes: float
    remat: str
    zero: int = 1


@dataclass(frozen=True)
class DeviceMemory:
    """Most bytes that a device of a submesh holds.

    Attributes:
      state_bytes: of all segments on these devices.
      kept_bytes: inputs of the groups in flight, and what their forward handed to backward.
      program: the one that takes most beside them, `work_bytes`.
      planned_bytes: what the planner expected of the peak; 0 where it does not say.
    """

    submesh: str
    state_bytes: float
    kept_bytes: float
    work_bytes: float
    program: str
    planned_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.state_bytes + self.kept_bytes + self.work_bytes


@dataclass(frozen=True)
class CompileReport:
    """A plan's programs compiled for a chip, and whether they fit into its memory.

    `budget_bytes` is what a device may use; the topology has `n_nodes` nodes, and every program is
    compiled for all devices of its submesh, as each process of a run compiles it.
    """

    chip: str
    n_devices: int
    n_nodes: int
    budget_bytes: float
    programs: tuple[ProgramReport, ...]
    memory: tuple[DeviceMemory, ...]
    fits: bool
    verdict: str

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 1 where a program does not compile or fit."""
        return 0 if self.fits else 1
