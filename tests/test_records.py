"""Records survive their JSON, refuse what is wrong, and derive what they should."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from dflop_jax import records
from dflop_jax.hardware import chip_peak_flops
from dflop_jax.records import (
    AXES,
    NO_GROUP,
    Bucket,
    DataProfile,
    Edge,
    Event,
    ExchangeCapacity,
    Group,
    Hardware,
    LayerTiming,
    Layout,
    Link,
    Load,
    MeshShape,
    ModelProfile,
    PackedPieces,
    ParamDims,
    Plan,
    Predicted,
    Price,
    PriceList,
    Prices,
    Profile,
    ProgramId,
    ResidualBytes,
    Schedule,
    SegmentPlan,
    SendId,
    Shape,
    SubmeshPlan,
    Task,
    Trace,
    TrialResult,
    first_piece_numbers,
    from_json,
    piece_tokens,
    to_json,
)
from dflop_jax.records.files import VERSION, load, save
from tests.rows import group_of_rows

SHAPE = Shape(4, 16)
ENC, DEC = SubmeshPlan("enc", 0, 1, 2, 1), SubmeshPlan("dec", 2, 2, 1, 2)
VISION = SegmentPlan("vision", "vision", 0, 3, "enc", True, True)
LLM = SegmentPlan("llm", "llm", 0, 8, "dec", True, True, rounds=2)
EDGE = Edge("vision", "llm", "visual", sources=4)
TAP = Edge("vision", "llm", "deep", "inner", leaves=2, enters=3)
BUCKET = Bucket.from_shapes({"vision": Shape(8, 16), "llm": Shape(1, 64)})
BUCKETS = BUCKET, Bucket.from_shapes({"llm": Shape(2, 32)})
LAYOUT = Layout((ENC, DEC), (VISION, LLM), BUCKETS, (EDGE,), group_size=2)
TRIAL = TrialResult("orch", 0.2, 0.3, 0.25, 6, "chosen: the fastest")
PREDICTED = Predicted(0.1, {"enc": 0.5}, {"dec": 7.0}, chosen_by_s=0.2)
PLAN = Plan("dflop", LAYOUT, predicted=PREDICTED, trials=(TRIAL,))
DATA = DataProfile("here", 7, (Load({"llm": (3,)}), Load({"vision": (16, 16), "llm": (14,)})))
MODEL = ModelProfile(
    "key", "cpu", (LayerTiming("llm", 2, SHAPE, 1e-3, 3e-3, 0.0, 1 / 3, 7.0, {"pair": 1e-9}),),
    {"llm": (ParamDims((8, 16), 1),)}, {"llm": ()}, {"llm": 4}, {"llm": 0.1}, 1.7, 1e-5, (EDGE,),
    ("llm",),
    {"vision": 16},
)  # fmt: skip
TILES = group_of_rows("vision", Shape(2, 16), ((((0,), (1,)), ((2,), ())),), (1,), (512,))
ROWS = group_of_rows("llm", Shape(1, 64), ((((1, 0),),),))
TASK = Task("vision", 0, "forward")
SCHEDULE = Schedule(3, (TILES, ROWS), (TASK,), 0.5, 0.25, "optimal", 40, 0.01)
PROGRAM = ProgramId("llm", SHAPE, "backward")
LINK = Link("all_reduce", True, 1e9, 1e-3)
HARDWARE = Hardware("x", "sm_90", 1e15, 5e14, 8e10, 3e12, 8, 4e11, 2e-6, 5e10, 4e-6, "", (LINK,))
EXAMPLES = [
    LINK, HARDWARE, dataclasses.replace(MODEL, hardware=HARDWARE, computed=True),
    Load({"vision": (16, 16), "llm": (9,)}, {"llm": ((45, 120),)}, {"vision": (2,)}),
    DATA, SHAPE, BUCKET, DEC, DEC.shape, LLM, EDGE, LAYOUT, PLAN.scheduling, PLAN, PREDICTED,
    TRIAL, TILES, SCHEDULE, Schedule(0, ()), TILES.pieces, PROGRAM,
    SendId("vision", "llm", SHAPE, "forward"), Price(1.0, (1e-9,)), ParamDims((8, 16), 1),
    ExchangeCapacity("vision", "llm", SHAPE, SHAPE, 0.5), ResidualBytes("llm", SHAPE, 2e9, 1e9),
    PriceList.from_prices(Prices({PROGRAM: Price(1.0)}, {Task("llm", NO_GROUP, "reduce"): 0.5})),
    Event("dec", "llm", 0, "forward", 0.0, 1.5),
    Trace(2, "measured", (Event("dec", "llm", 0, "forward", 0.25, 1e-9),)),
    MODEL.timings[0], MODEL.timings[0].recompute["none"], MODEL, Profile(MODEL, DATA),
]  # fmt: skip


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_round_trip(record, tmp_path):
    save(record, tmp_path / "r.json")
    assert load(type(record), tmp_path / "r.json") == record
    assert json.loads((tmp_path / "r.json").read_text())["record"] == type(record).__name__


def test_every_record_has_an_example():
    kinds = {k for k in vars(records).values() if dataclasses.is_dataclass(k)}
    assert {type(e) for e in EXAMPLES} == kinds - {Prices}  # keyed by records, it is never a file


def test_a_submesh_is_a_mesh_at_a_place():
    assert (DEC.shape.text, DEC.n_devices, DEC.devices) == ("2x1x2", 4, range(2, 6))
    devices = np.arange(24).reshape(2, 3, 4)
    for i, axis in enumerate(AXES):
        assert (np.diff(devices, axis=i) == MeshShape(*devices.shape).stride(axis)).all()


def head(**changes):
    whole = {"record": "Shape", "version": VERSION, "value": {"rows": 1, "tokens": 8}}
    return json.dumps(whole | changes)


@pytest.mark.parametrize("text, says", [
    ("", "not JSON"), ('{"record": "Sha', "not JSON"),
    ("[1, 2]", "contains no record, expected Shape"),
    (head(record="Plan"), "contains Plan, expected Shape"),
    (head(version=99), "version 99, this program reads"),
    (head(value={"rows": "x", "tokens": 8}), r"Expected `int`, got `str` - at `\$.rows`"),
    (head(value={"rows": 1}), "missing required field `tokens`"),
    (head(value={"rows": 0, "tokens": 8}), "a shape needs rows, tokens >= 1"),
])  # fmt: skip
def test_a_bad_file_is_named_in_one_line(text, says, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as failed:
        load(Shape, path)
    assert str(failed.value).startswith(f"{path}: ")
    assert "\n" not in str(failed.value)


def test_missing_files_and_invalid_plans_are_named(tmp_path):
    file = tmp_path / "plan.json"
    with pytest.raises(ValueError, match=r"plan.json: no such file"):
        load(Plan, file)
    save(PLAN, file)
    file.write_text(file.read_text().replace('"1f1b"', '"random"'))
    invalid = r"plan.json: Invalid enum value 'random' - at `\$.scheduling.order`"
    with pytest.raises(ValueError, match=invalid):
        load(Plan, file)


def changed(record, **changes):
    return dataclasses.replace(record, **changes)


def llm_parts(*cuts, last=-1):
    """LLM segments over [cuts[i], cuts[i+1]); which of them claims the last layer."""
    n = len(cuts) - 1
    return tuple(
        SegmentPlan(f"l{i}", "llm", cuts[i], cuts[i + 1], "enc", i == 0, i == last % n)
        for i in range(n)
    )


LOW, HIGH = llm_parts(0, 2, 4)
IN_ROUNDS = changed(LLM, rounds=3)
BAD_LAYOUTS = {
    "submesh names repeat": {"submeshes": (ENC, changed(DEC, name="enc"))},
    "a plan needs segments": {"segments": ()},
    "segment names repeat": {"segments": (changed(VISION, name="llm"), LLM)},
    "has unknown submesh 'gone'": {"segments": (VISION, changed(LLM, submesh="gone"))},
    "3 layers are not divisible into 2 stages": {"segments": (VISION, changed(LLM, stop=3))},
    "3 rounds need .* it has stage=2 and 8 layers: use": {"segments": (VISION, IN_ROUNDS)},
    "must be a multiple of stage=2": {"group_size": 3},
    "'vision' are not consecutive": {"segments": (changed(VISION, first=False), LLM)},
    "the source before the target; it has .'llm', 'vision'.": {"segments": (LLM, VISION)},
    "'llm' have zero=.1, 3.; use": {"segments": (VISION, LOW, changed(HIGH, zero=3))},
    "not sorted by module": {"segments": (LOW, VISION, HIGH), "edges": ()},
    "modules .'llm'. that the plan lacks": {"segments": (VISION,), "edges": ()},
    "buckets repeat; list each once": {"buckets": PLAN.layout.buckets[:1] * 2},
    "2 stages and an edge at an inner layer": {"edges": (EDGE, TAP)},
    "group_size 0 must be": {"group_size": 0},
    "fan_in 0 must be": {"fan_in": 0},
}
BAD_SCHEDULINGS = {
    "order 'lifo' is not": {"order": "lifo"},
    "grouping 'random' is not": {"grouping": "random"},
    "lookahead -1 must": {"lookahead": -1},
    "node -1 must": {"node": -1},
}


@pytest.mark.parametrize("says", [*BAD_LAYOUTS, *BAD_SCHEDULINGS])
def test_a_wrong_plan_cannot_exist(says):
    change = PLAN.with_layout if says in BAD_LAYOUTS else PLAN.with_scheduling
    with pytest.raises(ValueError, match=says) as failed:
        change(**{**BAD_LAYOUTS, **BAD_SCHEDULINGS}[says])
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("parts", [
    llm_parts(1, 4),  # the first layer is missing
    (HIGH, LOW),
    (LOW, changed(HIGH, start=3)),  # a gap
    (LOW, changed(HIGH, start=1)),  # an overlap
    llm_parts(0, 2, 4, last=0),  # the head before the last layers
    (LOW, changed(HIGH, first=True)),  # two embeddings
])  # fmt: skip
def test_segments_of_a_module_join_end_to_end(parts):
    assert changed(LAYOUT, segments=(VISION, LOW, HIGH)).modules == ("vision", "llm")
    with pytest.raises(ValueError, match="segments of 'llm' are not consecutive"):
        changed(LAYOUT, segments=(VISION, *parts))


@pytest.mark.parametrize("make", [
    lambda: Load({"vision": (0,)}), lambda: Load({"llm": (3,)}, {"llm": ()}),
    lambda: DataProfile("empty.json", 0, ()), lambda: Shape(0, 1), lambda: Bucket(()),
    lambda: Bucket((("llm", SHAPE), ("llm", SHAPE))), lambda: Edge("llm", "llm", "x"),
    lambda: Edge("a", "b", ""), lambda: Edge("a", "b", "x", sources=0),
    lambda: Edge("a", "b", "x", "tap"),  # after how many layers?
    lambda: Edge("a", "b", "x", leaves=2),  # by which tap?
    lambda: SegmentPlan("s", "llm", 2, 2, "m", True, True),
    lambda: SegmentPlan("s", "llm", 0, 2, "m", True, True, "some"),
    lambda: changed(VISION, zero=4), lambda: SubmeshPlan("m", -1, 1, 1, 1),
    lambda: SubmeshPlan("m", 0, 1, 0, 1), lambda: changed(MODEL, timings=()),
    lambda: changed(MODEL, concurrency=0.0), lambda: Prices({PROGRAM: Price(-1.0)}),
    lambda: Prices({PROGRAM: Price(0.0, (float("nan"),))}), lambda: Prices({}, concurrency=0.0),
    lambda: Prices({}, {Task("llm", NO_GROUP, "reduce"): float("inf")}),
    lambda: Group("llm", SHAPE, microbatches=0),
    lambda: group_of_rows("llm", Shape(1, 8), ((((0,), (1,)),),)),  # two rows in a shape of one
    lambda: changed(TILES, microbatches=1, pieces=PackedPieces(TILES.pieces.columns + 1)),
    lambda: changed(TILES, pieces=PackedPieces(TILES.pieces.columns - 1)),
    lambda: PackedPieces(np.zeros((3, 2), np.int64)),
    lambda: Schedule(0, (group_of_rows("llm", SHAPE, ((((1,), (1,)),),)),)),  # a piece twice
    lambda: Schedule(0, (ROWS, ROWS)),
    lambda: Schedule(0, (TILES,)),  # feeds a group that is not there
    lambda: Schedule(0, (changed(TILES, feeds=(1, 1)), ROWS)),
    lambda: Schedule(0, (changed(TILES, feeds=(1,)), changed(ROWS, module="vision"))),
])  # fmt: skip
def test_a_wrong_record_cannot_exist(make):
    with pytest.raises(ValueError, match=r".") as failed:
        make()
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("edge, sends, reads", [
    (Edge("v", "l", "x"), [2], [0]),
    (Edge("v", "l", "x", "t", leaves=0, enters=0), [0], [0]),
    (Edge("v", "l", "x", "t", leaves=2, enters=3), [0], [1]),
    (Edge("v", "l", "x", "t", leaves=6, enters=6), [2], [2]),
    (Edge("v", "l", "x", "t", leaves=7, enters=7), [], []),
])  # fmt: skip
def test_an_edge_leaves_one_segment_and_enters_one(edge, sends, reads):
    def parts(module):
        return [SegmentPlan("s", module, i, i + 2, "m", i == 0, i == 4) for i in (0, 2, 4)]

    assert [i for i, s in enumerate(parts("v")) if s.sends(edge)] == sends
    assert [i for i, s in enumerate(parts("l")) if s.reads(edge)] == reads


def test_what_shapes_schedules_and_traces_derive():
    loads = [Load({"llm": (3,)}), Load({}), Load({"vision": (16, 9), "llm": (14,)})]
    assert [loads[2].tokens(m) for m in ("vision", "llm", "audio")] == [25, 14, 0]
    assert first_piece_numbers(loads, "vision") == (0, 0, 0, 2)
    assert first_piece_numbers(loads, "llm") == (0, 1, 1, 2)
    assert piece_tokens(loads, "vision") == (16, 9)
    assert first_piece_numbers([], "llm") == (0,)
    assert TILES.pieces.piece_id.tolist() == [0, 1, 2]
    assert (SCHEDULE.feeders(1, "vision"), SCHEDULE.feeders(0, "vision")) == ((0,), ())
    assert (Trace(0, "m", ()).makespan_s, Trace(0, "m", ()).busy_fraction()) == (0.0, {})
    assert Trace(0, "m", (Event("a", "x", 0, "f", 0.0, 0.0),)).busy_fraction() == {"a": 0.0}


def test_a_record_cut_short_while_written_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    save(SHAPE, file)
    whole = Path.write_bytes

    def cut_short(path, data):
        whole(path, data[:9])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", cut_short)
    with pytest.raises(OSError, match="no space"):
        save(BUCKET, file)
    assert load(Shape, file) == SHAPE


@pytest.mark.parametrize("seed", range(6))
def test_places_of_pieces_are_what_loops_over_rows_say(seed):
    """Segment ids, and tokens before a piece in its row, in whatever order the entries stand."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 30)) if seed else 0
    places = PackedPieces(np.stack((rng.permutation(n), *rng.integers(0, 3, (3, n)))))
    length = rng.integers(1, 50, n)
    seen = {}
    for entry, (_, *row) in enumerate(places.columns.T.tolist()):
        before = seen.setdefault(tuple(row), [])
        assert places.segment[entry] == len(before) + 1
        assert places.row_offsets(length)[entry] == sum(before)
        before.append(length[entry])
    rows = places.sorted_by_row()
    ordered = sorted(map(tuple, places.columns.T.tolist()), key=lambda e: (*e[1:], e[0]))
    assert list(map(tuple, rows.columns.T.tolist())) == ordered
    assert from_json(to_json(rows), PackedPieces) == rows


@pytest.mark.parametrize(
    "columns", ['[4, "eJw"]', '[4, "eJxjAAAAAQAB"]', '[3, ""]', "5", '["x", ""]', "[4, 7]", "null"]
)
def test_damaged_places_are_refused_in_one_line(columns, tmp_path):
    text = json.dumps({"record": "PackedPieces", "version": 3, "value": {"columns": 0}})
    (tmp_path / "r.json").write_text(text.replace('"columns": 0', f'"columns": {columns}'))
    with pytest.raises(ValueError, match=r"r\.json") as failed:
        load(PackedPieces, tmp_path / "r.json")
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    "kind, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 156e12),
        ("NVIDIA H100 80GB HBM3", "float32", 494.7e12),
        ("NVIDIA L40S", "float32", 183e12),
        ("NVIDIA H200", "bfloat16", 989.4e12),
        # Slower ones of the same name, and parts of one, must be stated.
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("cpu", "float32", None),
        ("", "float32", None),
    ],
)
def test_peaks_of_chips_by_what_jax_calls_them(kind, dtype, peak):
    assert chip_peak_flops(kind, dtype) == peak
