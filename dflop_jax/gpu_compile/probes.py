"""Programs of a few layers of a module, compiled for a chip that is not here: what each launches
and holds. The process that compiles reads a `Setting`, then `Probe`s from stdin, and answers each
with a `Found` on stdout.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import msgspec

from dflop_jax.children import begin
from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel
from dflop_jax.gpu_compile.child import one_line
from dflop_jax.gpu_compile.chips import absent_devices
from dflop_jax.gpu_compile.hlo_kernels import hlo_kernels
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.segment import device_bytes
from dflop_jax.profile.kernels import Kernel
from dflop_jax.profile.parts import hidden_bytes
from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.records import BACKWARD, FORWARD, LAYERS, MeshShape, Remat, Shape
from dflop_jax.train.prepare import set_up


@dataclass(frozen=True)
class Setting:
    """What all probes of a process are of: a configuration whose `plan.hardware` names the chip,
    and the largest tensor-parallel degree."""

    config: Config
    most_ways: int


@dataclass(frozen=True)
class Probe:
    """`depth` layers of one kind of a module at a per-rank shape, with the module's ends or
    without, on one of `ways` tensor-parallel devices. `forward`: whether the forward that hands
    over to its backward is asked for, too."""

    module: str
    ways: int
    shape: Shape
    depth: int
    remat: Remat
    ends: bool = True
    forward: bool = False
    kind: str = LAYERS


@dataclass(frozen=True)
class Program:
    """A compiled program on one device: kernels without the content of attention (see
    `hlo_kernels`), and the bytes that it takes beside its arguments while it runs."""

    kernels: tuple[Kernel, ...]
    work_bytes: float


@dataclass(frozen=True)
class Found:
    """What a probe came to. `residual_bytes` go from forward to backward, 0 where one program runs
    both; `error` says in a line why it does not compile, `died` that the compiler did."""

    backward: Program | None = None
    forward: Program | None = None
    residual_bytes: float = 0.0
    hidden_bytes: float = 0.0
    error: str = ""
    died: bool = False


def main() -> None:
    """Serve one setting."""
    lines, out = begin()
    setting = msgspec.json.decode(lines.readline(), type=Setting)
    place = set_up(setting.config)
    assert place.hardware is not None, "plan.hardware is checked before a process is started"
    devices = absent_devices(place.hardware.name, place.hardware, setting.most_ways)
    for line in lines:
        result = compiled_probe(place.model, msgspec.json.decode(line, type=Probe), devices)
        out.write(msgspec.json.encode(result) + b"\n")
        out.flush()


def compiled_probe(model: MultimodalModel, probe: Probe, devices: list[jax.Device]) -> Found:
    """Compile a probe's programs."""
    try:
        return _compiled(model, probe, devices)
    except Exception as e:  # of whatever kind: that it does not compile is the answer
        return Found(error=one_line(e))


def _compiled(model: MultimodalModel, probe: Probe, devices: list[jax.Device]) -> Found:
    mesh = MeshShape(model=probe.ways)
    segment = shallow_segment(
        model, probe.module, probe.depth, devices, mesh, probe.remat,
        ends=probe.ends, kind=probe.kind,
    )  # fmt: skip
    lowering = Lowering(segment)
    # Rows of one piece are full: what attention computes is known.
    content = probe.module in model.piece_tokens
    forward = None
    if probe.forward or segment.compiles_forward_first:
        executable = lowering.lower(probe.shape, FORWARD).compile()
        forward = _program(executable, content=content)
        if segment.compiles_forward_first:
            lowering.learn_residuals(probe.shape, executable)
    backward = lowering.lower(probe.shape, BACKWARD).compile()
    return Found(
        _program(backward, content=content),
        forward,
        device_bytes(lowering.residual_structs(probe.shape)),
        hidden_bytes(segment.module, probe.shape),
    )


def _program(executable: jax.stages.Compiled, *, content: bool) -> Program:
    stats = executable.memory_analysis()
    assert stats is not None, "XLA tells what its programs for GPUs take"
    own_bytes = stats.output_size_in_bytes - stats.alias_size_in_bytes
    work_bytes = float(stats.temp_size_in_bytes + own_bytes)
    return Program(hlo_kernels(executable.as_text() or "", content=content), work_bytes)
