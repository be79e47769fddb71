"""Profile of a model on an absent chip, from programs compiled for it.

A few layers of every module are compiled (`worker.Probe`) under every recompute policy, at two
depths and at a small and a large shape; the difference of two depths gives one layer. The roofline
gives the time of the compiled kernels; the compiler reports the bytes. Traces give the remaining
quantities: the recomputed share of attention, and residuals of segments that run forward and
backward in one task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax import records
from dflop_jax.aot.chips import compiler_environment, find_chip
from dflop_jax.aot.compiling import OnProgress, compile_probes
from dflop_jax.aot.worker import Probe, ProbeResult
from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel, on_chip
from dflop_jax.data import Source
from dflop_jax.profile.kernels import program_s
from dflop_jax.profile.roofline import POLICIES, roofline_profile
from dflop_jax.profile.traced_parts import has_loss
from dflop_jax.records import DataProfile, Hardware, LayerTiming, Profile, Recompute, Remat, Shape
from dflop_jax.train.profiling import (
    make_profile,
    profile_data,
    tensor_degrees,
    with_trained_parameters,
)
from dflop_jax.train.run_context import RunContext

# Ratio of tokens of the large shape to the small one; a larger ratio covers a wider range, but fits
# less well.
_SHAPES_RATIO = 4
# Numbers of layers in the programs, which are unrolled; their difference gives a layer's cost.
# Plans add the copies of loops over layers (`profile.loops`).
_DEPTHS = (2, 4)
# Array of: forward and backward seconds; bytes of residuals, backward's work and hidden states.
_Cost = np.ndarray
_FORWARD_S, _BACKWARD_S, _RESIDUALS, _WORK, _HIDDEN = range(5)


def predict_profile(
    context: RunContext,
    source: Source,
    on_progress: OnProgress,
    on_message: Callable[[str], None],
) -> Profile:
    """Return the profile of the model on `plan.hardware` and of the data. Times come from compiled
    programs, or from data sheets if there is no compiler (`on_message` gets the reason). ValueError
    if a module does not compile for the chip at any tensor-parallel degree."""
    hardware, model = context.hardware, context.model
    assert hardware is not None, "predict_profile needs plan.hardware"
    try:
        find_chip(hardware.name)
        compiler_environment()
    except ValueError as e:
        on_message(f"prices come from data sheets, not from compiled programs: {e}")
        return make_profile(context, source)
    data = profile_data(context, source)
    shapes = {m: _probe_shapes(data, m, model, context.token_multiple) for m in model.modules}
    degrees, n = tensor_degrees(context), context.n_devices
    profile = compile_profile(context.config, model, hardware, shapes, degrees, n, on_progress)
    return Profile(with_trained_parameters(context, profile), data)


def _probe_shapes(
    data: DataProfile, module: str, model: MultimodalModel, multiple: int
) -> list[Shape]:
    """Return a small and a large shape of a module, up to four times the largest sample. Sizes are
    powers of two, so that similar data reuses compiled probes."""
    if module in model.piece_tokens:
        max_pieces = max(len(load.lengths(module)) for load in data.loads)
        rows, tokens = 2 * _next_power_of_two(max_pieces), model.piece_tokens[module]
        return [Shape(max(1, rows // _SHAPES_RATIO), tokens), Shape(rows, tokens)]
    tokens = 2 * _next_power_of_two(max(load.tokens(module) for load in data.loads))
    tokens = max(tokens, multiple * _SHAPES_RATIO)
    return [Shape(1, tokens // _SHAPES_RATIO), Shape(1, tokens)]


def _next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def compile_profile(
    config: Config,
    model: MultimodalModel,
    hardware: Hardware,
    shapes: Mapping[str, Sequence[Shape]],
    degrees: Sequence[int],
    n_devices: int,
    on_progress: OnProgress = lambda *_: None,
) -> records.ModelProfile:
    """Return a profile from programs compiled for `hardware`, at tensor-parallel `degrees`.
    `shapes`: a small and a large per-rank shape of each module."""
    traced = roofline_profile(model, hardware, shapes, degrees, n_devices=n_devices)
    remat = config.train.remat
    policies = POLICIES if remat == "auto" else tuple(dict.fromkeys(("none", remat)))
    compiled = tuple(r for r in policies if r != "segment")  # "segment" is derived from "none"
    modules = {m: on_chip(module, hardware.chip) for m, module in model.modules.items()}
    probe_sets = [
        ProbeSet(m, tp, tuple(shapes[m]), compiled, has_loss(modules[m], shapes[m][0]), kind)
        for m, kind, tp in dict.fromkeys((t.module, t.kind, t.model) for t in traced.timings)
    ]
    probes = [p for probe_set in probe_sets for p in probe_set.probes]
    results = compile_probes(config, model, probes, on_progress)
    compilable = _compilable(probe_sets, results, hardware)
    costs = {p: _probe_cost(p, r, hardware) for p, r in results.items() if not r.error}
    by_key = {(t.module, t.kind, t.model, t.shape): t for t in traced.timings}
    timings = [
        s.timing(by_key[s.module, s.kind, s.tp, shape], costs)
        for s in compilable
        for shape in s.shapes
    ]
    facts = [traced.key, *(sorted(map(repr, costs.items())))]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return replace(
        traced,
        key=f"compiled-{digest}",
        timings=tuple(timings),
        priced_by=f"programs compiled for {hardware.name}",
    )


def _compilable(
    probe_sets: Sequence[ProbeSet], results: Mapping[Probe, ProbeResult], hardware: Hardware
) -> list[ProbeSet]:
    """Return the probe sets of degrees at which the whole module compiles; ValueError: none."""
    errors = {
        (s.module, s.tp): results[p].error for s in probe_sets for p in s.probes if results[p].error
    }
    compilable = [s for s in probe_sets if (s.module, s.tp) not in errors]
    for (module, _), error in errors.items():
        if not any(s.module == module for s in compilable):
            raise ValueError(
                f"{module} cannot be compiled for {hardware.name}: {error}; choose other "
                "plan.hardware, or a smaller data.max_tokens"
            )
    return compilable


def _probe_cost(probe: Probe, result: ProbeResult, hardware: Hardware) -> _Cost:
    assert result.backward is not None, "a probe without programs has an error"
    seconds = (
        program_s(program.kernels if program else (), probe.tp, hardware)
        for program in (result.forward, result.backward)
    )
    n_bytes = result.residual_bytes, result.backward.work_bytes, result.hidden_bytes
    return np.array([*seconds, *n_bytes])


@dataclass(frozen=True)
class ProbeSet:
    """Probes of layers of one kind at one tensor-parallel degree: two depths, and a small and a
    large shape. A module with a loss runs forward and backward in one program; therefore its layers
    are also compiled without the ends, at one depth."""

    module: str
    tp: int
    shapes: tuple[Shape, ...]
    remats: tuple[Remat, ...]
    has_loss: bool
    kind: str

    @property
    def probes(self) -> list[Probe]:
        points = [(s, r) for r in self.remats for s in self.shapes]
        kinds = [(d, True) for d in _DEPTHS] + [(_DEPTHS[1], False)] * self.has_loss
        return [self._probe(s, r, d, ends) for s, r in points for d, ends in kinds]

    def _probe(self, shape: Shape, remat: Remat, depth: int, ends: bool) -> Probe:
        forward = remat == "none" and not (ends and self.has_loss)
        return Probe(self.module, self.tp, shape, depth, remat, ends, forward, self.kind)

    def _split_layer(
        self, costs: Mapping[Probe, _Cost], shape: Shape, remat: Remat, *, ends: bool = True
    ) -> tuple[_Cost, _Cost]:
        """Return (cost of one layer, of the rest) of programs with or without the module's ends."""
        if not ends:
            whole = costs[self._probe(shape, remat, _DEPTHS[1], ends)]
            shared = np.where(np.arange(len(whole)) == _WORK, whole, 0.0)
            return (whole - shared) / _DEPTHS[1], shared
        shallow, deep = (costs[self._probe(shape, remat, d, ends)] for d in _DEPTHS)
        layer = np.maximum(0.0, deep - shallow) / (_DEPTHS[1] - _DEPTHS[0])
        return layer, deep - _DEPTHS[1] * layer

    def timing(self, traced: LayerTiming, costs: Mapping[Probe, _Cost]) -> LayerTiming:
        """Return the traced timing with the compiled programs' seconds and bytes at its shape."""
        shape = traced.shape
        hidden_bytes = float(costs[self._probe(shape, "none", _DEPTHS[0], True)][_HIDDEN])
        layer, ends = self._split_layer(costs, shape, "none")
        forward_s, backward_s = layer[:2].tolist()
        ends_s = np.maximum(0.0, ends[:2]).tolist()
        if self.has_loss:
            forward_s = float(self._split_layer(costs, shape, "none", ends=False)[0][_FORWARD_S])
            backward_s -= forward_s
            # The loss and its gradient are one program, with three products for each of forward's.
            ends_s = [ends_s[_BACKWARD_S] / 3, ends_s[_BACKWARD_S] * 2 / 3]
        recompute = {
            r: replace(
                self._policy_cost(costs, shape, r, hidden_bytes),
                content_s=traced.recompute[r].content_s,
            )
            for r in self.remats
        }
        return replace(
            traced,
            layer_forward_s=forward_s,
            layer_backward_s=backward_s,
            ends_forward_s=float(ends_s[0]),
            ends_backward_s=float(ends_s[1]),
            hidden_bytes=hidden_bytes,
            recompute=recompute,
        )

    def _policy_cost(
        self, costs: Mapping[Probe, _Cost], shape: Shape, remat: Remat, hidden_bytes: float
    ) -> Recompute:
        """Return the cost of a recompute policy; seconds are in addition to the policy "none"."""
        layer, ends = self._split_layer(costs, shape, remat)
        none = self._split_layer(costs, shape, "none")
        more_s = [a[_BACKWARD_S] - b[_BACKWARD_S] for a, b in zip((layer, ends), none, strict=True)]
        loss_bytes = 0.0
        if self.has_loss:
            whole_bytes = ends[_WORK] + _DEPTHS[1] * layer[_WORK]
            layer, ends = self._split_layer(costs, shape, remat, ends=False)
            hidden_bytes *= records.tp_share(shape.rows, shape.tokens, self.tp)
            residual_bytes = _DEPTHS[1] * layer[_RESIDUALS] + 2 * hidden_bytes
            loss_bytes = whole_bytes - residual_bytes
        n_bytes = layer[_RESIDUALS], ends[_RESIDUALS], ends[_WORK], layer[_WORK], loss_bytes
        layer_s, ends_s, *bytes_each = (max(0.0, float(x)) for x in (*more_s, *n_bytes))
        return Recompute(layer_s, ends_s, {}, *bytes_each)
