"""`dflop evaluate` on tables of questions, conversations and the embedded scenes: what is asked,
how it is shared, what is written."""

import io
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from dflop_jax.cli import main
from dflop_jax.cluster.peers import Peers
from dflop_jax.config import Config, DataConfig, ModelConfig
from dflop_jax.data import ByteTokenizer, MediaSpec, SceneSource
from dflop_jax.data.media.limits import Limits
from dflop_jax.evaluate import questions
from dflop_jax.evaluate.run import evaluate
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.prompt import prompt_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.train.load_params import Loaded
from dflop_jax.train.prepare import build_model
from tests.data.datasets.test_tables import save_parquet
from tests.data.media_cases import noise, talk

EXPERIMENT = """
from dflop_jax import Config, DataConfig, ModelConfig

def config():
    return Config(model=ModelConfig(size="nano"),
                  data=DataConfig(max_tiles=2, max_tokens=160, workers=1), cache_dir="cache")
"""
CONFIG = Config(model=ModelConfig(size="nano"), data=DataConfig(max_tiles=2, workers=2))


def picture(n):
    out = io.BytesIO()
    Image.fromarray(noise(30 + 20 * n, 40)).save(out, "png")
    return {"bytes": out.getvalue(), "path": f"{n}.png"}


ROWS = [
    {"question": "What?", "answers": ["a", "b"], "image": picture(0)},
    {"question": "Where is that?", "answers": [], "image": picture(1)},
    {"question": "x" * 200, "answers": ["too long"], "image": None},
    {"question": "Who?", "answers": ["c"], "image": {"bytes": b"no picture", "path": "bad.png"}},
    {"question": "Why?", "answers": ["d"], "image": None},
]


@pytest.fixture(autouse=True)
def _random_parameters(tmp_path, monkeypatch):
    """In the place of a checkpoint's."""

    def load(run, model, structs, **_):
        def draw(path, s):
            seed = sum(map(ord, jax.tree_util.keystr(path)))
            noise = 0.3 * np.random.default_rng(seed).normal(size=s.shape)
            value = (noise + (path[-1].key == "scale")).astype(s.dtype)
            return jax.device_put(value, s.sharding)

        return Loaded(jax.tree_util.tree_map_with_path(draw, structs), 7, Path(run))

    monkeypatch.setattr("dflop_jax.generate.generate.load_params", load)
    monkeypatch.chdir(tmp_path)
    Path("nano.py").write_text(EXPERIMENT)
    Path("talk.json").write_text(json.dumps([{"id": 1, "conversations": talk("Hi?", "Ho.")}]))
    jax.devices()


def run(capsys, *args):
    """(exit code, stdout, stderr) of `dflop evaluate`."""
    capsys.readouterr()
    try:
        code = main(["evaluate", *args])
    except SystemExit as e:  # argparse leaves by this door
        code = e.code
    return code, *capsys.readouterr()


def test_a_table_of_questions(capsys):
    save_parquet(ROWS, Path("set.parquet"))
    asked = ("nano.py", "--data", "set.parquet", "--max-tokens", "4", "--batch", "3")
    metrics = ("--metrics", "exact", "anls", "choice")
    code, out, _ = run(capsys, *asked, *metrics, "--json", "--out", "here")
    result = json.loads(out)
    assert (code, result["samples"]) == (0, 3)
    names = [a["name"] for a in result["answers"]]
    assert names == [f"set.parquet[{k}]" for k in range(5)]
    troubles = [a["trouble"] for a in result["answers"]]
    assert [bool(t) for t in troubles] == [False, False, True, True, False]
    assert "exceed data.max_tokens=160" in troubles[2]
    assert "set.parquet[3]" in troubles[3]
    assert [sorted(a["scores"]) for a in result["answers"]] == [
        ["anls", "exact"], [], [], [], ["anls", "exact"],
    ]  # fmt: skip
    assert result["metrics"]["choice"] is None
    # Each as the same question is answered alone.
    generator = Generator(CONFIG, "run", jax.devices()[:1])
    for k in (0, 1, 4):
        media = {}
        if ROWS[k]["image"]:
            Path(f"{k}.png").write_bytes(ROWS[k]["image"]["bytes"])
            media = {"image": [f"{k}.png"]}
        alone = generator.answer(ROWS[k]["question"], media, Sampling(4))
        assert result["answers"][k]["answer"] == alone.answer.strip()
    lines = Path("here/answers.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result["answers"]
    facts = json.loads(Path("here/evaluation.json").read_text())
    assert (facts["metrics"], facts["step"]) == (result["metrics"], 7)
    page = Path("here/answers.html").read_text()
    assert "What?" in page
    assert "exceed data.max_tokens" in page
    assert "<script" not in page


def test_no_references_are_no_failure(capsys):
    save_parquet([{"question": "What?"}, {"question": "Why <b>?"}], Path("bare.parquet"))
    code, out, _ = run(
        capsys, "nano.py", "--data", "bare.parquet", "--max-tokens", "2", "--out", "o"
    )
    assert code == 0
    assert "exact: no references" in out
    assert "2 answers; wrote o: answers.html, answers.jsonl, evaluation.json" in " ".join(
        out.split()
    )
    assert "Why &lt;b&gt;?" in Path("o/answers.html").read_text()


def test_an_answer_that_is_right_counts(capsys):
    save_parquet(ROWS[4:], Path("one.parquet"))
    asked = ("nano.py", "--data", "one.parquet", "--max-tokens", "3", "--out", "o", "--json")
    said = json.loads(run(capsys, *asked)[1])["answers"][0]["answer"]
    save_parquet([{**ROWS[4], "answers": ["no", said]}], Path("one.parquet"))
    assert json.loads(run(capsys, *asked)[1])["metrics"] == {"exact": 1.0}


def test_conversations_and_a_draw_of_scenes(capsys):
    code, out, _ = run(capsys, "nano.py", "--data", "talk.json", "--max-tokens", "2", "--json")
    (answer,) = json.loads(out)["answers"]
    assert (answer["question"], answer["references"]) == ("Hi?", ["Ho."])
    assert Path("runs/run/evaluated/answers.html").is_file()
    args = ("nano.py", "--samples", "3", "--max-tokens", "2", "--json", "--out", "o")
    code, out, _ = run(capsys, *args, "--data.n_samples", "9", "--data.max_tokens", "400")
    result = json.loads(out)
    assert (code, result["samples"], len(result["answers"])) == (0, 3, 3)
    assert all(a["references"] for a in result["answers"])


def test_a_sample_s_question_is_what_stands_before_its_answer():
    model, tokenizer = build_model(CONFIG.model), ByteTokenizer()
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    source = SceneSource(12, 3, spec, tokenizer, Limits(2, 8, 1024), split="eval")
    for k, asked in enumerate(questions.of_source(source, tokenizer, 0, 0)):
        scene, question = source.scene(k), asked.make()
        assert question.references == (scene.answer,)
        assert scene.question.replace("<image>", "").strip() in question.text
        if any(p.frames for p in scene.pictures):
            continue
        files = []
        for i, p in enumerate(scene.pictures):
            files.append(f"{k}_{i}.png")
            p.render().save(files[-1])
        same = prompt_sample(scene.question, {"image": files}, CONFIG.data, model, tokenizer)
        assert same.load == question.sample.load
        fields = question.sample.fields["llm"]
        for name in ("tokens", "is_visual", "is_newline"):
            np.testing.assert_array_equal(same.fields["llm"][name], fields[name])
        for pair, places in same.places.items():
            np.testing.assert_array_equal(places.index, question.sample.places[pair].index)


def test_no_end_token_is_in_a_reference(monkeypatch):
    tokenizer = ByteTokenizer()
    model = build_model(CONFIG.model)
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    source = SceneSource(12, 3, spec, tokenizer, Limits(2, 8, 1024), split="eval")
    ends = frozenset({tokenizer.im_end_id, ord("e")})
    monkeypatch.setattr(questions, "end_ids", lambda of, run: ends)
    for k, asked in enumerate(questions.of_source(source, tokenizer, 0, 0)):
        assert asked.make().references == (source.scene(k).answer.replace("e", ""),)


class Together(Peers):
    """Process 0 of two, that is given what the other one gathered."""

    def __init__(self, other):
        self.process, self.count, self.other = 0, 2, other

    def gather(self, key, value):
        return [value, self.other]

    def share(self, key, value=None):
        return value


class Second(Together):
    """The other one, that notes what it gathers."""

    def gather(self, key, value):
        self.other = value
        return []

    def share(self, key, value=None):
        return b"[]"


def test_two_replicas_give_what_one_gives():
    save_parquet(
        [{"question": f"What {k}?", "answers": ["x"]} for k in range(7)], Path("s.parquet")
    )
    config = replace(CONFIG, data=replace(CONFIG.data, path="s.parquet"))
    how, metrics = Sampling(3, temperature=1.0), ["exact", "wer"]
    generator = Generator(config, "run", jax.devices()[:1], rows=2)
    asked = questions.of_records(config.data, generator.model, generator.tokenizer, 0)
    alone = evaluate(generator, asked, how, metrics, Peers())
    second = Second(b"")
    generator.replica = replace(generator.replica, number=1, count=2)
    with pytest.raises(IndexError):  # what is shared with it here holds no answers
        evaluate(generator, asked, how, metrics, second)
    generator.replica = replace(generator.replica, number=0)
    assert evaluate(generator, asked, how, metrics, Together(second.other)) == alone
    assert len({a.answer for a in alone.answers}) > 3


@pytest.mark.parametrize(
    "args, says",
    [
        (["--data", "gone.parquet"], "gone.parquet"),
        (["--data", "talk.json", "--metrics", "bleu"], "no metric 'bleu'; there are exact"),
        (["--data", "talk.json", "--samples", "-1"], "--samples is at least 0"),
        (["--data", "talk.json", "--batch", "0"], "--batch at least 1"),
        (["--data", "talk.json", "--data.path", "x"], "say the same; give one of them"),
        (["--data", "talk.json", "--max-tokens", "0"], "max-tokens=0 must be at least 1"),
        (["--data", "talk.json", "--data.max_tokens", "3"], "none of 1 questions can be asked"),
        (["--data", "talk.json", "--data.columns", "image"], "write FIELD=COLUMN"),
        (["--data", "talk.json", "--ways", "3"], "--ways 3: parameters are split"),
    ],
)
def test_mistakes_end_in_one_line(capsys, args, says):
    code, out, err = run(capsys, "nano.py", *args)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
