"""Write and read traces as Chrome trace JSON, for https://ui.perfetto.dev.

One process per trace, one thread per submesh. Perfetto colours slices by name, so all forward
tasks of a segment share one colour. Times are rounded to nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.records import Event, Group, Schedule, Trace

Labelled = tuple[Trace, dict[int, str]]  # a trace and the labels of its groups


def group_label(group: Group) -> str:
    """Return a group's label: module, shape, and the segments that keep more residuals of it."""
    return f"{group.module}:{group.shape.name}" + "".join(f" +{s}" for s in group.remat_less)


def group_labels(schedules: Iterable[Schedule]) -> dict[int, str]:
    """Return the label of every group, by its number in a trace of consecutive schedules."""
    return dict(enumerate(group_label(g) for s in schedules for g in s.groups))


def write_trace(
    path: str | Path, traces: Sequence[Trace], labels: Mapping[int, str] | None = None
) -> None:
    """Write traces as one file that Perfetto opens; `labels` are by group number."""
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces):
        label = {"name": f"{trace.source}, step {trace.step}"}
        events += [
            {"ph": "M", "pid": pid, "name": "process_name", "args": label},
            {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
        ]
        submeshes = list(dict.fromkeys(e.submesh for e in trace.events))
        for tid, name in enumerate(submeshes):
            thread: dict[str, Any] = {"ph": "M", "pid": pid, "tid": tid}
            events.append(thread | {"name": "thread_name", "args": {"name": name}})
            events.append(thread | {"name": "thread_sort_index", "args": {"sort_index": tid}})
        for e in trace.events:
            task = {"segment": e.segment, "direction": e.direction, "group": e.group}
            bucket = {"bucket": labels[e.group]} if labels and e.group in labels else {}
            start_ns, end_ns = round(e.start_s * 1e9), round(e.end_s * 1e9)
            times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
            thread = {"ph": "X", "pid": pid, "tid": submeshes.index(e.submesh)}
            names = {"name": f"{e.segment} {e.direction}", "cat": e.direction}
            events.append({**thread, **names, **times, "args": task | bucket})
    heads = [{"step": t.step, "source": t.source} for t in traces]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"traces": heads}}
    Path(path).write_bytes(msgspec.json.encode(document))


def read_trace(path: str | Path) -> list[Labelled]:
    """Read the traces of a trace.json, each with the labels of its groups."""
    remedy = "train again, or delete it to report without a timeline"
    try:
        return _from_chrome(msgspec.json.decode(Path(path).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {remedy}") from None
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, ValueError) as e:
        raise ValueError(f"{path}: not a trace of dflop_jax ({e!r}); {remedy}") from None


def _from_chrome(document: Mapping[str, Any]) -> list[Labelled]:
    heads, slices = document["otherData"]["traces"], document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in slices if e["name"] == "thread_name"}
    events: list[list[Event]] = [[] for _ in heads]
    labels: list[dict[int, str]] = [{} for _ in heads]
    for e in slices:
        if e["ph"] != "X":
            continue
        task, pid = e["args"], e["pid"]
        if bucket := task.pop("bucket", None):
            labels[pid][task["group"]] = bucket
        start_ns, end_ns = round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)
        times = {"start_s": start_ns / 1e9, "end_s": end_ns / 1e9}
        events[pid].append(Event(submesh=names[pid, e["tid"]], **task, **times))
    return [
        (Trace(h["step"], h["source"], tuple(of_trace)), trace_labels)
        for h, of_trace, trace_labels in zip(heads, events, labels, strict=True)
    ]
