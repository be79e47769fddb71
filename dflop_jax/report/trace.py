"""Traces as Chrome trace JSON, for https://ui.perfetto.dev, and back.

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
    """How pictures, tables and memory curves call a group: its module, its shape, and the segments
    that keep more of it."""
    return f"{group.module}:{group.shape.name}" + "".join(f" +{s}" for s in group.remat_less)


def group_labels(schedules: Iterable[Schedule]) -> dict[int, str]:
    """Label of every group, by its number in a trace of these schedules one after another."""
    return dict(enumerate(group_label(g) for s in schedules for g in s.groups))


def write_trace(
    path: str | Path, traces: Sequence[Trace], labels: Mapping[int, str] | None = None
) -> None:
    """Write traces as one file that Perfetto opens; `labels` are those of their groups."""
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
        events += [_slice(pid, submeshes.index(e.submesh), e, labels or {}) for e in trace.events]
    heads = [{"step": t.step, "source": t.source} for t in traces]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"traces": heads}}
    Path(path).write_bytes(msgspec.json.encode(document))


def _slice(pid: int, tid: int, e: Event, labels: Mapping[int, str]) -> dict[str, Any]:
    start_ns, end_ns = round(e.start_s * 1e9), round(e.end_s * 1e9)
    args: dict[str, Any] = {"segment": e.segment, "direction": e.direction, "group": e.group}
    if e.group in labels:
        args["bucket"] = labels[e.group]
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": f"{e.segment} {e.direction}",
        "cat": e.direction,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": args,
    }


def _from_chrome(obj: Mapping[str, Any]) -> list[Labelled]:
    """The traces that `write_trace` wrote; KeyError or TypeError: it is not one of ours."""
    heads = obj["otherData"]["traces"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in obj["traceEvents"]
        if e["name"] == "thread_name"
    }
    events: list[list[Event]] = [[] for _ in heads]
    labels: list[dict[int, str]] = [{} for _ in heads]
    for e in obj["traceEvents"]:
        if e["ph"] != "X":
            continue
        task = e["args"]
        start_ns, end_ns = round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)
        events[e["pid"]].append(
            Event(
                submesh=names[e["pid"], e["tid"]],
                segment=task["segment"],
                group=task["group"],
                direction=task["direction"],
                start_s=start_ns / 1e9,
                end_s=end_ns / 1e9,
            )
        )
        if "bucket" in task:
            labels[e["pid"]][task["group"]] = task["bucket"]
    return [
        (Trace(h["step"], h["source"], tuple(of_trace)), trace_labels)
        for h, of_trace, trace_labels in zip(heads, events, labels, strict=True)
    ]


def read_trace(path: str | Path) -> list[Labelled]:
    """Return the traces of a trace.json, each with the labels of its groups; times come back to
    within a nanosecond.

    Raises:
      ValueError: the file is missing, or is not one of ours.
    """
    remedy = "train again, or delete it to report without a timeline"
    try:
        return _from_chrome(msgspec.json.decode(Path(path).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {remedy}") from None
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, ValueError) as e:
        raise ValueError(f"{path}: not a trace of dflop_jax ({e!r}); {remedy}") from None
