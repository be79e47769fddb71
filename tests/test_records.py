"""Records survive their JSON, refuse what is wrong, and derive what they should."""

import dataclasses
import json

import pytest

from dflop_jax import records
from dflop_jax.record_files import load, save
from dflop_jax.records import (
    Bucket,
    DataProfile,
    Event,
    LayerTiming,
    Microbatch,
    ModelProfile,
    ModuleShape,
    Plan,
    Profile,
    SampleShape,
    Schedule,
    SegmentPlan,
    SubmeshPlan,
    Task,
    Trace,
)

SHAPE = ModuleShape(4, 16)
ENC, DEC = SubmeshPlan("enc", 0, 1, 2, 1), SubmeshPlan("dec", 2, 2, 1, 2)
VISION = SegmentPlan("vision", "vision", 0, 3, "enc", True, True)
LLM = SegmentPlan("llm", "llm", 0, 4, "dec", True, True)
PLAN = Plan(
    "dflop", (ENC, DEC), (VISION, LLM), (Bucket(8, 64), Bucket(0, 32, 2, 3)), group_size=2,
    predicted={"makespan_s": 0.1},
)  # fmt: skip
DATA = DataProfile("here", 7, (SampleShape(0, 3, 3), SampleShape(2, 3, 14, 2, 1)))
MODEL = ModelProfile(
    "key", "cpu", (LayerTiming("llm", 2, SHAPE, 1e-3, 3e-3, 0.0, 1 / 3, 5.0, 6.0, 7.0),),
    {"llm": 10}, {"llm": 20}, {"llm": 4}, {"llm": 0.1}, {"vision": 16}, 1.7, 1e-5,
)  # fmt: skip
SCHEDULE = Schedule(3, ((Microbatch(0, (((0, 2), ()), ((1,),))),),), 0.5, 0.25, "optimal", 0.01)
EXAMPLES = [
    SampleShape(1, 2, 3, 1),
    DATA,
    SHAPE,
    Bucket(8, 64, 2),
    DEC,
    LLM,
    PLAN,
    Microbatch(1, (((), (4,)),)),
    SCHEDULE,
    Schedule(0, ()),
    Task("llm", -1, "reduce"),
    Event("dec", "llm", 0, "forward", 0.0, 1.5),
    Trace(2, "measured", (Event("dec", "llm", 0, "forward", 0.25, 1e-9),)),
    MODEL.timings[0],
    MODEL,
    Profile(MODEL, DATA),
]


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_round_trip(record, tmp_path):
    save(record, tmp_path / "r.json")
    assert load(type(record), tmp_path / "r.json") == record
    assert json.loads((tmp_path / "r.json").read_text())["record"] == type(record).__name__


def test_every_record_has_an_example():
    kinds = {
        k
        for k in vars(records).values()
        if dataclasses.is_dataclass(k) and k.__module__ == records.__name__
    }
    assert {type(e) for e in EXAMPLES} == kinds


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_records_are_frozen(record):
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, getattr(record, name))


def head(**changes):
    whole = {"record": "Bucket", "version": 2, "value": {"tiles": 1, "tokens": 8}}
    return json.dumps(whole | changes)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "not JSON"),
        ('{"record": "Buck', "not JSON"),
        ("nonsense", "not JSON"),
        ("[1, 2]", "holds no record, expected Bucket"),
        ("{}", "holds no record, expected Bucket"),
        (head(record="Plan"), "holds Plan, expected Bucket"),
        (head(version=99), "version 99, this program reads 2"),
        (head(version=None), "version None, this program reads 2"),
        (head(value={"tiles": "x", "tokens": 8}), r"Expected `int`, got `str` - at `\$.tiles`"),
        (head(value={"tiles": 1}), "missing required field `tokens`"),
        (head(value={"tiles": -1, "tokens": 8}), "a bucket needs tiles and windows >= 0"),
        (head(value=[]), "Expected `object`, got `array`"),
    ],
)
def test_a_bad_file_is_named_in_one_line(text, says, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as failed:
        load(Bucket, path)
    assert str(failed.value).startswith(f"{path}: ")
    assert "\n" not in str(failed.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone.json: no such file"):
        load(Plan, tmp_path / "gone.json")


def test_an_invalid_plan_cannot_be_loaded(tmp_path):
    save(PLAN, tmp_path / "plan.json")
    raw = json.loads((tmp_path / "plan.json").read_text())
    raw["value"]["order"] = "random"
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"plan.json: order 'random' is not 1f1b or gpipe"):
        load(Plan, tmp_path / "plan.json")


def changed(record, **changes):
    return dataclasses.replace(record, **changes)


def llm_parts(*cuts, first=0, last=-1):
    """LLM segments over [cuts[i], cuts[i+1]); which of them claim the ends."""
    n = len(cuts) - 1
    return tuple(
        SegmentPlan(f"l{i}", "llm", cuts[i], cuts[i + 1], "enc", i == first, i == last % n)
        for i in range(n)
    )


BAD_PLANS = {
    "submesh names repeat": {"submeshes": (ENC, changed(DEC, name="enc"))},
    "a plan needs segments": {"segments": ()},
    "a plan needs segments, buckets": {"buckets": ()},
    "order 'lifo' is not": {"order": "lifo"},
    "grouping 'random' is not": {"grouping": "random"},
    "segment names repeat": {"segments": (changed(VISION, name="llm"), LLM)},
    "lies on unknown submesh 'gone'": {"segments": (VISION, changed(LLM, submesh="gone"))},
    "holds no layer": {"segments": (VISION, changed(LLM, stop=0))},
    "3 layers do not divide into 2 stages": {"segments": (VISION, changed(LLM, stop=3))},
    "must be a multiple of stage=2": {"group_size": 3},
    "do not join end to end": {"segments": (VISION, changed(LLM, last=False))},
    "'vision' do not join": {"segments": (changed(VISION, first=False), LLM)},
    "'llm' last, got .'llm', 'vision'.": {"segments": (LLM, VISION)},
    "'llm' last, got .'vision'.": {"segments": (VISION,)},
    "group_size 0 must be": {"group_size": 0},
}


@pytest.mark.parametrize("says", BAD_PLANS)
def test_a_wrong_plan_cannot_exist(says):
    with pytest.raises(ValueError, match=says) as failed:
        changed(PLAN, **BAD_PLANS[says])
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    "parts",
    [
        llm_parts(1, 4),  # the first layer is missing
        llm_parts(0, 2, 4)[::-1],  # out of order
        (llm_parts(0, 2, 4)[0], changed(llm_parts(0, 2, 4)[1], start=3)),  # a gap
        (llm_parts(0, 2, 4)[0], changed(llm_parts(0, 2, 4)[1], start=1)),  # an overlap
        llm_parts(0, 2, 4, last=0),  # the head before the last layers
        llm_parts(0, 2, 4, first=1),
        (llm_parts(0, 2, 4)[0], changed(llm_parts(0, 2, 4)[1], first=True)),  # two embeddings
    ],
)
def test_segments_of_a_module_join_end_to_end(parts):
    assert changed(PLAN, segments=(VISION, *llm_parts(0, 2, 4))).modules == ("vision", "llm")
    with pytest.raises(ValueError, match="segments of 'llm' do not join end to end"):
        changed(PLAN, segments=(VISION, *parts))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SampleShape(-1, 0, 1),
        lambda: SampleShape(0, -1, 1),
        lambda: SampleShape(0, 0, 1, -1),
        lambda: SampleShape(0, 0, 0),
        lambda: DataProfile("empty.json", 0, ()),
        lambda: ModuleShape(-1, 1),
        lambda: ModuleShape(1, 0),
        lambda: Bucket(-1, 1),
        lambda: Bucket(1, 0),
        lambda: Bucket(1, 1, 0),
        lambda: SubmeshPlan("m", -1, 1, 1, 1),
        lambda: SubmeshPlan("m", 0, 0, 1, 1),
        lambda: SubmeshPlan("m", 0, 1, 0, 1),
        lambda: SubmeshPlan("m", 0, 1, 1, 0),
        lambda: changed(MODEL, timings=()),
        lambda: changed(MODEL, concurrency=0.0),
        lambda: Schedule(0, ((Microbatch(0, ((),)), Microbatch(1, ((),))),)),  # two buckets
        lambda: Schedule(0, ((),)),  # a group without microbatches
        lambda: Schedule(0, ((Microbatch(0, (((1,), (1,)),)),),)),  # a sample twice
        lambda: Schedule(0, tuple((Microbatch(0, (((1,),),)),) for _ in range(2))),
    ],
)
def test_a_wrong_record_cannot_exist(make):
    with pytest.raises(ValueError, match=r".") as failed:
        make()
    assert "\n" not in str(failed.value)


def test_what_a_plan_derives():
    assert PLAN.modules == ("vision", "llm")
    assert PLAN.n_devices == 6
    assert PLAN.data_ranks("vision") == 2
    assert PLAN.data_ranks("llm") == 1
    assert (DEC.shape, DEC.n_devices, DEC.devices) == ((2, 1, 2), 4, range(2, 6))
    assert LLM.n_layers == 4
    assert Bucket(8, 64, 2).name == "8x2x64"
    assert SHAPE.size == 64


def test_segments_of_a_module_share_their_data_ranks():
    first, second = llm_parts(0, 2, 4)
    plan = changed(PLAN, segments=(VISION, first, changed(second, submesh="dec")))
    with pytest.raises(ValueError, match="'llm' differ in data parallelism"):
        plan.data_ranks("llm")


def test_what_shapes_schedules_and_traces_derive():
    shape = SampleShape(2, 3, 11)
    assert (shape.load("vision"), shape.load("llm")) == (2, 11)
    assert SCHEDULE.samples == (0, 2, 1)
    assert Schedule(0, ()).samples == ()
    trace = Trace(
        0,
        "simulated",
        (
            Event("a", "x", 0, "forward", 0.0, 1.0),
            Event("a", "x", 0, "backward", 2.0, 4.0),
            Event("b", "y", 0, "backward", 1.0, 2.0),
        ),
    )
    assert trace.makespan_s == 4.0
    assert trace.busy_fraction() == {"a": 0.75, "b": 0.25}
    assert Trace(0, "measured", ()).makespan_s == 0.0
    assert Trace(0, "measured", ()).busy_fraction() == {}
    assert Trace(0, "m", (Event("a", "x", 0, "f", 0.0, 0.0),)).busy_fraction() == {"a": 0.0}
