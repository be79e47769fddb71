"""`dflop check`: what it says of data is what a run would find, and its page says so."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.cli import check
from dflop_jax.config import DataConfig, ModelConfig
from dflop_jax.data import MediaSpec, make_source
from dflop_jax.train.run_context import build_model
from tests.cli.command_line import run
from tests.data.media_cases import made_dataset, talk, write_wav
from tests.front.made import llava_data, processor_files


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "MAX_SECONDS", 300.0)  # however slow the machine is
    monkeypatch.setattr(check, "SAMPLE_TIMEOUT_S", 60.0)


def answer(capsys, *words):
    code, out, err = run(capsys, "check", *words, "--json")
    return code, json.loads(out), err


def default_spec():
    model = build_model(ModelConfig(*check.DEFAULT_MODEL))
    return MediaSpec.of(model.preprocessing, model.piece_tokens)


def marked(page):
    """The text of a page's samples that is trained on, by sample."""
    samples = page.split("\n== ")[1:]
    return ["".join(re.findall(r"\[\[(.*?)\]\]", s, re.DOTALL)) for s in samples]


def test_every_record_of_sound_data_is_seen(capsys):
    file = made_dataset(Path("data"), 6)
    code, said, err = answer(capsys, "--data", str(file))
    assert (code, err) == (0, "")
    counted = "counted as by models.omni:build omni-tiny, text in bytes"
    assert counted in said["facts"]["model"]
    assert not said["facts"].keys() & {"weights", "needs"}  # of a model that nobody asked for
    # One of the pictures is too thin for any grid: that is no fault of the file.
    assert (said["records"], said["listed"], said["bad_by_reason"]) == (6, 6, {})
    assert said["decoded"] == 6
    source = make_source(
        DataConfig(path=str(file), max_tokens=10**6), default_spec(), in_processes=False
    )
    loads = [source.load(i) for i in range(len(source))]
    assert len(source) == 6 - said["left_out"]
    found = {"all": said["tokens"]["all"], **said["pieces"]}
    for name in ("all", "vision", "audio"):
        values = [load.tokens("llm") if name == "all" else len(load.lengths(name))
                  for load in loads]  # fmt: skip
        assert found[name] == [min(values), int(np.median(values)), max(values)]
    assert marked(Path(said["page"]).read_text())[0] == "One.<|im_end|>"


def test_what_limits_cut_is_counted(capsys):
    file = made_dataset(Path("data"), 1)
    later = {"image": "exact.png", "conversations": talk("Hm?", "yes", "y" * 90 + "<image>", "no")}
    talks = (talk("Hm?", "no"), talk("Hm?", "x" * 200), talk("z" * 200, "no"))
    file.write_text(json.dumps([later, *({"conversations": t} for t in talks)]))
    _, said, _ = answer(capsys, "--data", str(file), "--data.max_tokens", "100")
    assert (said["cut_text"], said["cut_media"], said["too_long"]) == (2, 1, 1)
    assert "text cut in 2, media cut from 1, 1 too long" in Path(said["page"]).read_text()


def test_bad_records_are_counted_by_reason(capsys):
    file = made_dataset(Path("data"), 5)
    records = json.loads(file.read_text())
    cut = Path("data/exact.png").read_bytes()
    Path("data/cut.png").write_bytes(cut[: len(cut) // 2])
    records += [
        {"image": "gone.png", "conversations": talk("<image>?", "x")},
        {"image": "lost.png", "conversations": talk("<image>?", "x")},
        {"image": "cut.png", "conversations": talk("<image>?", "x")},
        {"id": "a b", "conversations": talk("What?", " ")},
    ]
    file.write_text(json.dumps(records))
    code, said, _ = answer(capsys, "--data", str(file))
    assert (code, said["records"], said["decoded"]) == (2, 9, 6)  # more than 10% bad
    assert said["bad_by_reason"] == {
        "missing file": 2, "cannot be decoded": 1, "an answer is empty": 1,
    }  # fmt: skip
    assert "gone.png" in Path(said["page"]).read_text()


def test_sounds_that_are_heard_in_part_are_counted(capsys, caplog):
    spec = default_spec()
    heard_s = spec.prepared(DataConfig())["audio"].spec.max_samples // 16_000
    for k, seconds in enumerate((1, heard_s, heard_s + 1, 3 * heard_s)):
        write_wav(Path(f"{k}.wav"), np.full((1, seconds * 1000), 900), 1000)
    records = [{"audio": f"{k}.wav", "conversations": talk("<audio>?", "x")} for k in range(4)]
    Path("d.json").write_text(json.dumps(records))
    _, said, _ = answer(capsys, "--data", "d.json")
    says = f"audio longer than the {heard_s} s that the model hears: 2; split it"
    assert says in Path(said["page"]).read_text()
    make_source(DataConfig(path="d.json", max_tokens=10**6), spec, in_processes=False)
    assert says in caplog.text


def test_some_of_many_records(capsys):
    lines = [json.dumps({"conversations": talk(f"{k}?", "x" * k)}) for k in range(1, 41)]
    Path("many.jsonl").write_text("\n".join(lines))
    code, said, _ = answer(capsys, "--data", "many.jsonl", "--records", "4", "--page", "p.html")
    assert (code, said["records"], said["listed"], said["page"]) == (0, 4, 40, "p.html")
    least, _, greatest = said["tokens"]["text"]
    assert greatest - least == 30 + 1  # of lines 1, 11, 21 and 31; the last has one more digit


def test_what_cannot_be_read_at_all(capsys):
    Path("d.json").write_text('[{"conversations": [')
    for file, says in (("d.json", "not JSON"), ("gone.json", "no such file or folder")):
        code, said, err = answer(capsys, "--data", file)
        assert (code, err.count("\n"), said["records"]) == (2, 1, 0)
        assert says in err
        assert sum(said["bad_by_reason"].values()) == 1


def test_a_model_its_template_and_a_sample_that_memory_cannot_hold(capsys, monkeypatch):
    processor_files(Path("qwen"))
    file = llava_data(Path("photos"), 4)
    code, said, _ = answer(capsys, "--model", "qwen", "--data", str(file))
    assert code == 0
    assert "safetensors" in said["wrong"]["weights"]
    assert "largest sample" not in said["wrong"]
    assert "models.qwen3_vl:build" in said["facts"]["model"]
    page = Path(said["page"]).read_text()
    assert "<|vision_start|>" in page
    answers = [t["value"] for t in json.loads(file.read_text())[0]["conversations"][1::2]]
    assert marked(page)[0] == "".join(f"{a}<|im_end|>" for a in answers)
    monkeypatch.setattr("dflop_jax.distributed.devices.available_host_bytes", lambda: 1 << 16)
    _, said, _ = answer(capsys, "--model", "qwen", "--data", str(file))
    assert "the largest sample has" in said["wrong"]["largest sample"]
    assert "--data.max_pixels" in said["wrong"]["largest sample"]


def test_too_little_memory_is_wrong(capsys):
    code, said, _ = answer(capsys, "--model.size", "tiny", "--plan.memory_bytes", "1e4")
    assert code == 0
    assert "iB per device for state" in said["wrong"]["needs"]
    assert said["records"] == 0
    _, said, _ = answer(capsys, "--plan.hardware", "h100", "--plan.devices", "8")
    assert "8 x h100" in said["facts"]["devices"]
    assert said["facts"]["model"].endswith("give a model by --model FOLDER_OR_NAME, or by "
                                           "--model.size NAME")  # fmt: skip
    assert "counted" not in said["facts"]["model"]  # where there are no data
