"""Builds the segments of a plan on devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dflop_jax.contract import MultimodalModel, chip_of, edges_of, on_chip
from dflop_jax.records import AXES, Layout, MeshShape
from dflop_jax.runtime.module_parts import segment_layer_kinds, segment_parts
from dflop_jax.runtime.parameter_layout import param_specs
from dflop_jax.runtime.segment import Segment
from dflop_jax.simulate.task_graph import segment_links, segments_with_backward, tied_segments


def make_mesh(layout: Layout, name: str, devices: list[jax.Device]) -> Mesh:
    """Return the mesh of the named submesh; raise ValueError if there are too few devices."""
    m = layout.submesh(name)
    if m.devices.stop > len(devices):
        raise ValueError(
            f"submesh {name!r} needs devices {m.first}..{m.devices.stop - 1} but only "
            f"{len(devices)} exist; lower plan.devices or start with more devices"
        )
    block = devices[m.first : m.devices.stop]
    if not can_form_submesh(block):
        raise ValueError(
            f"submesh {name!r} spans processes with several CPU devices each, whose collectives "
            "wait for each other; start one process per device (dflop launch -n N)"
        )
    return device_mesh(m, block)


def device_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh of this shape on the first devices."""
    return Mesh(np.array(devices[: shape.n_devices]).reshape(shape.sizes), AXES)


def can_form_submesh(devices: Sequence[jax.Device]) -> bool:
    """Return whether devices can form a submesh: CPU devices of several processes, one of each."""
    processes = [d.process_index for d in devices]
    return devices[0].platform != "cpu" or len(set(processes)) in (1, len(processes))


def trained_groups(model: MultimodalModel, freeze: Sequence[str]) -> tuple[str, ...]:
    """Return the freeze groups that train; raise ValueError if a name is unknown or none trains."""
    modules = model.modules.values()
    freeze_groups = dict.fromkeys(g for m in modules for g in m.freeze_groups.values())
    if unknown := set(freeze) - set(freeze_groups):
        raise ValueError(f"cannot freeze {sorted(unknown)}; the model has {sorted(freeze_groups)}")
    if set(freeze) >= set(freeze_groups):
        raise ValueError(
            "every part of the model is frozen, nothing is left to train; leave one out of "
            "train.freeze"
        )
    return tuple(g for g in freeze_groups if g not in freeze)


def make_segments(
    model: MultimodalModel, layout: Layout, devices: list[jax.Device], *, freeze: Sequence[str] = ()
) -> dict[str, Segment]:
    """Return the segments of a plan by name, in topological order.

    Raises:
      ValueError: a name in `freeze` is unknown, everything is frozen, there are too few devices,
        the plan does not cover the model's layers, or its degrees do not divide the model's sizes.
    """
    trained_groups(model, freeze)
    check_model(layout, model)
    trains: dict[str, frozenset[str]] = {}
    for s in layout.segments:
        module = model.modules[s.module]
        parts = segment_parts(s, module)
        trains[s.name] = frozenset(p for p in parts if module.freeze_groups[p] not in freeze)
    shared = tied_segments(layout)
    for reader, owner in shared.items():
        trains[reader] |= trains[owner] & {"entry"}
    backward = segments_with_backward(layout, [name for name, parts in trains.items() if parts])
    segments: dict[str, Segment] = {}
    for s in layout.segments:
        mesh = make_mesh(layout, s.submesh, devices)
        receives = [k for k in segment_links(layout) if k.target == s.name and k.source in backward]
        degrees = {layout.submesh(o.submesh).model for o in layout.segments_of(s.module)}
        segments[s.name] = Segment(
            plan=s,
            module=on_chip(model.modules[s.module], chip_of(mesh.devices.flat[0])),
            mesh=mesh,
            microbatches=layout.group_size,
            trainable=trains[s.name],
            wants_gradient=frozenset(k.edge.name if k.edge else "hidden" for k in receives),
            # Edges from modules that the plan leaves out are included.
            edges=tuple(e for e in edges_of(model) if s.reads(e) or (e in layout.edges)),
            shares_entry=s.name in shared,
            passes_sharded=len(degrees) == 1,
        )
        _check_stages(segments[s.name])
        param_specs(segments[s.name])  # raises for a degree that does not divide a dim
    return segments


def _check_stages(s: Segment) -> None:
    """Raise ValueError unless all stages of a loop have the same kinds of layers in every round."""
    kinds, n = segment_layer_kinds(s.plan, s.module), s.chunk_layers
    chunks = {kinds[i : i + n] for i in range(0, len(kinds), n)}
    if len(chunks) > 1:
        raise ValueError(
            f"segment {s.name!r}: layers {s.plan.start} to {s.plan.stop - 1} of {s.plan.module!r} "
            f"do not have the same sequence of kinds in each of {s.stages} stages and "
            f"{s.plan.rounds} rounds; cut it into segments, or into stages that hold whole patterns"
        )


def check_model(layout: Layout, model: MultimodalModel) -> None:
    """Raise ValueError if the plan was made for another model."""
    if unknown := set(layout.modules) - set(model.modules):
        raise ValueError(f"the plan has modules {sorted(unknown)} that the model lacks; plan again")
    model_edges = edges_of(model)
    for e in layout.edges:
        if e not in model_edges:
            raise ValueError(f"the plan has an edge {e} that the model lacks; plan again")
    for e in model_edges:
        if {e.source, e.target} <= set(layout.modules) and e not in layout.edges:
            raise ValueError(f"the plan lacks the model's edge {e}; plan again")
    for name in layout.modules:
        module, segments = model.modules[name], layout.segments_of(name)
        if segments[-1].stop != module.n_layers:
            raise ValueError(
                f"the plan covers {segments[-1].stop} layers of {name!r}, the model has "
                f"{module.n_layers}; it was made for another model, plan again"
            )
        if module.tied != (name in layout.tied):
            raise ValueError(f"plan and model differ on whether {name!r} is tied; plan again")
