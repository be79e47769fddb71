"""LLaVA-format files: what loads, what is left out and why, and the real shared media."""

import json
import logging

import numpy as np
import pytest
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer, Limits, LlavaSource, MediaSpec, SceneSource, make_source

SPEC = MediaSpec(16, 4)
TOKENIZER = ByteTokenizer()


def record(i, **changes):
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"Number {i}."}]
    return {"id": f"r{i}", "image": "a.png", "conversations": turns, **changes}


def turns(*texts):
    return [{"from": ("human", "gpt")[k % 2], "value": t} for k, t in enumerate(texts)]


@pytest.fixture
def folder(tmp_path):
    Image.new("RGB", (32, 16), "red").save(tmp_path / "a.png")
    Image.new("RGB", (10, 10), "blue").save(tmp_path / "b.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "empty.png").write_bytes(b"")
    return tmp_path


def load(folder, records, **options):
    (folder / "dataset.json").write_text(json.dumps(records))
    return LlavaSource(folder, SPEC, TOKENIZER, **{"max_bad_fraction": 1.0, **options})


def text_of(sample):
    return TOKENIZER.decode(sample.tokens[~sample.visual.used])


def test_order_of_media_follows_the_tags(folder):
    talk = turns("Left <image> and", "one", "right <image>.", "two")
    sample = load(folder, [record(0, image=["b.png", "a.png"], conversations=talk)]).sample(0)
    assert len(sample.tiles) == 1 + 1 + 2  # b is one tile, a its base tile and a grid of 1 x 2
    assert (sample.tiles[0] == (0, 0, 255)).all()
    assert (sample.tiles[1] == (255, 0, 0)).all()
    first, second = np.split(np.flatnonzero(sample.visual.used), [4])
    assert TOKENIZER.decode(sample.tokens[: first[0]]) == "user\nLeft "
    assert TOKENIZER.decode(sample.tokens[first[-1] + 1 : second[0]]).endswith("user\nright ")
    assert TOKENIZER.decode(sample.tokens[sample.supervised]) == "onetwo"


BAD = {
    "missing file": {"image": "none.png"},
    "2 <image> tags for 1 images": {"conversations": turns("<image><image>", "a")},
    "0 <image> tags for 1 images": {"conversations": turns("no tag", "a")},
    "1 <image> tags for 0 images": {"image": None},
    "no conversations": {"conversations": []},
    "not {from, value}": {"conversations": ["hello"]},
    "not human": {"conversations": turns("<image>", "a")[::-1]},
    "answer is empty": {"conversations": turns("<image>", " ")},
    "up to an answer": {"conversations": turns("<image>", "a", "b")},
    "from 'robot'": {"conversations": [{"from": "robot", "value": "<image>"}]},
    "list of paths": {"image": {"path": "a.png"}},
    "broken.png": {"image": "broken.png", "at": "sample"},
    "empty.png": {"image": "empty.png"},
    "not a readable video": {"image": None, "video": "empty.png",
                             "conversations": turns("<video>", "a")},
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_record_is_named_and_left_out(folder, reason, caplog):
    changes = dict(BAD[reason])
    late = changes.pop("at", None) == "sample"
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        source = load(folder, [record(0), record(1, **changes)])
    if late:  # its header is fine
        with pytest.raises(ValueError, match=r"dataset\.json\[1\] id=r1.*broken\.png"):
            source.sample(1)
        return
    assert len(source) == source.counts["unusable"] == 1
    (message,) = [r.getMessage() for r in caplog.records]
    assert "dataset.json[1] id=r1" in message
    assert reason in message
    assert "\n" not in message
    with pytest.raises(ValueError, match=r"1 of 2 records .*r1.*max_bad_fraction"):
        load(folder, [record(0), record(1, **changes)], max_bad_fraction=0.4)


def test_audio_is_skipped_in_one_line(folder, caplog):
    records = [record(0), *(record(k, audio="a.wav") for k in (1, 2))]
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        source = load(folder, records, max_bad_fraction=0.0)
    assert source.counts == {"usable": 1, "unusable": 0, "audio": 2, "oversize": 0}
    (message,) = [r.getMessage() for r in caplog.records]
    assert "2 audio records" in message
    assert "id=r1" in message


@pytest.mark.parametrize(
    "content, reason",
    [("[{", "not JSON"), ('{"a": 1}', "expected a JSON list"), ("[]", "empty list"),
     ('[{"id": 1}]', "1 of 1 records"), ("\xff", "not JSON")],
)  # fmt: skip
def test_an_unusable_file_is_one_line(folder, content, reason):
    (folder / "d.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=reason) as caught:
        LlavaSource(folder / "d.json", SPEC, TOKENIZER)
    assert "\n" not in str(caught.value)
    assert "d.json" in str(caught.value)


def test_nothing_usable_is_fatal_whatever_the_fraction(folder):
    with pytest.raises(ValueError, match="no usable record"):
        load(folder, [record(0, audio="a.wav")])
    with pytest.raises(ValueError, match="no usable record"):
        load(folder, [record(0, image="none.png")])


def test_finding_the_file(folder):
    with pytest.raises(ValueError, match="no such file"):
        LlavaSource(folder / "none.json", SPEC, TOKENIZER)
    with pytest.raises(ValueError, match=r"0 \.json"):
        LlavaSource(folder, SPEC, TOKENIZER)
    (folder / "x.jsonl").write_text(json.dumps(record(0)) + "\n\n" + json.dumps(record(1)))
    assert len(LlavaSource(folder, SPEC, TOKENIZER)) == 2
    (folder / "y.json").write_text(json.dumps([record(0)]))
    with pytest.raises(ValueError, match=r"2 \.json"):
        LlavaSource(folder, SPEC, TOKENIZER)


def test_a_broken_line_is_named_by_file_and_line(folder, caplog):
    lines = [json.dumps(record(k)) for k in range(12)]
    lines[2] = lines[2][:30]
    (folder / "d.jsonl").write_text("\n".join([*lines[:5], "", *lines[5:]]))
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        source = LlavaSource(folder / "d.jsonl", SPEC, TOKENIZER)
    assert len(source) == 11
    assert "d.jsonl:3 left out: not JSON" in caplog.text
    assert source.label(10) == "d.jsonl:13 id=r11"


def test_oversize(folder):
    records = [record(0), record(1, conversations=turns("<image>", "long " * 99))]
    for oversize, count in (("truncate", 2), ("drop", 1)):
        source = load(folder, records, limits=Limits(max_tokens=90, oversize=oversize))
        assert len(source) == count
        for i in range(count):
            assert source.sample(i).shape == source.shape(i)
            assert source.shape(i).llm_tokens <= 90
    assert source.counts["oversize"] == 1
    with pytest.raises(ValueError, match=r"id=r1.*max_tokens=90"):
        load(folder, records, limits=Limits(max_tokens=90, oversize="error"))


def test_held_out_share_is_fixed_and_disjoint(folder):
    records = [record(k) for k in range(200)]
    parts = [load(folder, order, split=split, eval_fraction=0.1)
             for order in (records, records[::-1]) for split in ("train", "eval")]  # fmt: skip
    train, held, *again = [{text_of(p.sample(i)) for i in range(len(p))} for p in parts]
    assert [train, held] == again
    assert not train & held
    assert len(train | held) == 200
    assert 5 < len(held) < 40
    with pytest.raises(ValueError, match="eval_fraction"):
        load(folder, records, split="eval")


def test_make_source(folder):
    scenes = make_source(DataConfig(n_samples=7), SPEC, "eval")
    assert isinstance(scenes, SceneSource)
    assert len(scenes) == 7
    (folder / "dataset.json").write_text(json.dumps([record(0)]))
    blank = make_source(DataConfig(path=str(folder), blank_images=True), SPEC)
    assert (blank.sample(0).tiles == 128).all()
    assert blank.sample(0).shape == blank.shape(0)


@pytest.mark.parametrize("max_tokens", [1024, 150])
def test_all_shared_media_load_as_their_headers_say(shared_data, max_tokens, caplog):
    limits = Limits(max_tokens=max_tokens, max_frames=8)
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        source = LlavaSource(shared_data, MediaSpec(32, 4), TOKENIZER, limits)
        samples = [source.sample(i) for i in range(len(source))]
    assert [s.shape for s in samples] == [source.shape(i) for i in range(len(source))]
    assert all(s.supervised.any() for s in samples)
    assert len(source) + source.counts["audio"] + source.counts["oversize"] == 146
    assert max_tokens < 1024 or source.counts["oversize"] == 0
    assert "repeated" not in caplog.text  # no clip breaks off
    assert all(s.tiles.std() > 0 for s in samples if len(s.tiles))


USABLE = {"bad_truncated_jpg", "bad_truncated_png", "bad_corrupt_idat_png", "odd_png_named_jpg",
          "bad_half_index_first", "good_control"}  # fmt: skip


def test_all_shared_bad_records(shared_data, caplog):
    file = shared_data / "bad/bad_records.json"
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        source = LlavaSource(file, SPEC, TOKENIZER, root=shared_data, max_bad_fraction=1.0)
    ids = [source.label(i).split("id=")[1] for i in range(len(source))]
    assert set(ids) == USABLE
    assert source.counts["audio"] == 3
    for raw in json.loads(file.read_text()):
        assert raw["id"] in ids or f"id={raw['id']}" in caplog.text
    for i, name in enumerate(ids):
        if name.startswith("bad"):  # only the pixels are broken
            with pytest.raises(ValueError, match=f"id={name}.*bad/"):
                source.sample(i)
        else:
            assert source.sample(i).shape == source.shape(i)
    with pytest.raises(ValueError, match="13 of 19"):
        LlavaSource(file, SPEC, TOKENIZER, root=shared_data)


def test_shared_broken_files(shared_data):
    with pytest.raises(ValueError, match=r"broken\.json: not JSON"):
        LlavaSource(shared_data / "bad/broken.json", SPEC, TOKENIZER)
    file = shared_data / "bad/broken_line.jsonl"
    with pytest.raises(ValueError, match=r"broken_line\.jsonl:3"):
        LlavaSource(file, SPEC, TOKENIZER, root=shared_data)
    source = LlavaSource(file, SPEC, TOKENIZER, root=shared_data, max_bad_fraction=0.25)
    assert source.counts == {"usable": 3, "unusable": 1, "audio": 2, "oversize": 0}
