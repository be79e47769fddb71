"""Samples and files that are wrong, through the command line: each is one line that names it."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.command_line import refused, run
from tests.data.media_cases import noise, write_clip
from tests.plans import nano_profile

QWEN = ("--model.factory", "models.qwen3_vl:build", "--model.size")


def ask(content, **more):
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "An answer."}]
    return {"messages": talk, **more}


BAD = {
    "a picture too thin": (ask("<image>?", image="thin.png"), "picture of 10000x1 pixels"),
    "a clip of one frame": (ask("<video>?", video="one.mp4"), "a clip of 1 frames of 64x48"),
    "no content": (ask(None), "message 0 (of user) has no content"),
    "a tag alone": (ask("<image> and <image>?", image="good.png"), "2 <image> tags for 1 images"),
    "a picture alone": (ask("What?", image="good.png"), "0 <image> tags for 1 images"),
}


@pytest.fixture(autouse=True)
def media():
    Image.fromarray(noise(1, 10_000)).save("thin.png")
    Image.fromarray(noise(40, 60)).save("good.png")
    write_clip(Path("one.mp4"), 1)


def write(*records):
    Path("d.json").write_text(json.dumps(records))
    return ("--data.path", "d.json")


@pytest.mark.parametrize("bad", BAD)
def test_a_dataset_of_nothing_else_is_refused(capsys, bad):
    record, why = BAD[bad]
    line = refused(capsys, "profile", "nano.py", *QWEN, "qwen3-vl-tiny", *write(record))
    assert why in line
    assert "d.json[0]" in line
    assert not Path("run").exists()


def test_each_is_named_and_the_others_go_on(capsys, caplog, monkeypatch):
    known = nano_profile().model  # to time a model is another test's matter
    monkeypatch.setattr("dflop_jax.train.profiling.profile_model", lambda *_: known)
    good = ask("<image>?", image="good.png")
    data = write(good, *(record for record, _ in BAD.values()), good, good)
    limits = ("--data.max_bad_fraction", "0.5", "--data.max_tokens", "512")
    code, _, err = run(capsys, "profile", "nano.py", *QWEN, "qwen3-vl-tiny", *data, *limits)
    assert code == 0, err
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    for k, (_, why) in enumerate(BAD.values(), 1):
        (line,) = [x for x in lines if f"d.json[{k}]" in x]
        assert why in line
        assert "\n" not in line
    profile = json.loads(Path("run/profile.json").read_text())["value"]
    assert profile["data"]["n_total"] == 3


def test_a_column_that_is_missing(capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"chat": ["x"], "image": ["good.png"]}), "t.parquet")
    line = refused(capsys, "profile", "nano.py", "--data.path", "t.parquet")
    assert (
        "no column conversations or messages or question, there are chat, image; say which it is"
        in line
    )
    part = {"path": "t.parquet", "columns": {"messages": "talk"}}
    Path("m.yaml").write_text(json.dumps({"parts": [part]}))
    line = refused(capsys, "profile", "nano.py", "--data.path", "m.yaml")
    assert "t.parquet" in line
    assert "no column 'talk'; there are chat, image" in line


def test_fields_and_columns_that_are_named_wrongly(capsys):
    data = write(ask("What?"))
    line = refused(capsys, "profile", "nano.py", *data, "--data.columns", "chat=messages")
    assert "'chat' as a field; write FIELD=COLUMN, fields are id, weight, " in line
    Path("m.yaml").write_text("parts:\n  - {path: d.json, wieght: 2.0}\n")
    line = refused(capsys, "profile", "nano.py", "--data.path", "m.yaml")
    assert "part d.json: unknown field 'wieght'; known: path, weight, subset, root" in line
    Path("d.json").write_text(json.dumps([{"chat": [], "uid": 1}]))
    code, out, _ = run(capsys, "check", *data)
    assert code == 2
    said = " ".join(out.split())
    assert "d.json[0]: no conversations, messages, question; there are chat, uid" in said
    assert "other names are said by --data.columns, such as messages=chat" in said


@pytest.mark.parametrize("sections", [[24, 20, 19], [64, 0], [0, 32, 32]])
def test_sections_of_positions_that_do_not_fit(capsys, sections):
    config = {
        "model_type": "qwen3_vl",
        "text_config": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": sections},
        },
        "vision_config": {"model_type": "qwen3_vl", "out_hidden_size": 64},
    }
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(config))
    line = refused(capsys, "profile", "nano.py", *QWEN, "hf")
    assert "mrope_section" in line
