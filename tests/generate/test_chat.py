"""A talk: every turn is asked after those before it, and a wrong line leaves it as it was."""

from pathlib import Path
from types import SimpleNamespace

from PIL import Image

from dflop_jax.cli import main
from dflop_jax.config import Config, DataConfig, ModelConfig
from dflop_jax.data import ByteTokenizer
from dflop_jax.generate.chat import chat
from dflop_jax.generate.prompt import Talk, talk_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.train.prepare import build_model

CONFIG = Config(model=ModelConfig(size="nano"), data=DataConfig(max_tiles=2, max_tokens=300))
MODEL = build_model(CONFIG.model)


class Echo:
    """Says how many turns it was asked after, if the model could be."""

    model = MODEL

    def __init__(self):
        self.talks = []

    def reply(self, talk, how, show):
        talk_sample(talk, CONFIG.data, MODEL, ByteTokenizer())
        self.talks.append(talk)
        show(f"after {len(talk.turns)}")
        return SimpleNamespace(answer=f"after {len(talk.turns)}")


def test_turns_follow_each_other(tmp_path):
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    shown, echo = [], Echo()
    lines = ["What is it?\n", "  \n", f"/image {tmp_path}/a.png\n", "And this?\n",
             "/image gone.png", "Here?", "x" * 400, "/what", "Sure?", "/new", "Who?"]  # fmt: skip
    talk = chat(echo, lines, Sampling(), shown.append, {"image": [tmp_path / "a.png"]})
    assert talk.turns == (("human", "Who?"), ("gpt", "after 1"))
    long = echo.talks[2]
    assert [text for _, text in long.turns] == [
        "<image>\nWhat is it?", "after 1", "<image>\nAnd this?", "after 3", "Sure?",
    ]  # fmt: skip
    assert [where for _, where in long.media] == [tmp_path / "a.png"] * 2
    said = "".join(shown)
    assert "gone.png: no such picture" in said
    assert "exceed data.max_tokens=300" in said
    assert "/new begins another talk" in said
    assert said.endswith("after 1\n")


def test_the_tokens_of_a_talk_are_those_of_its_turns():
    tokenizer = ByteTokenizer()
    talk = Talk((("human", "a"), ("gpt", "b"), ("human", "c")))
    ids = talk_sample(talk, CONFIG.data, MODEL, tokenizer).fields["llm"]["tokens"]
    said = tokenizer.spelled(ids.tolist())
    assert [said.index(x) for x in ("user\na", "assistant\nb", "user\nc")] == sorted(
        said.index(x) for x in ("user\na", "assistant\nb", "user\nc")
    )
    assert said.endswith("assistant\n")
    one = talk_sample(Talk(talk.turns[:1]), CONFIG.data, MODEL, tokenizer).fields["llm"]["tokens"]
    assert ids[: len(one)].tolist() == one.tolist()


def test_a_talk_in_the_terminal(tmp_path, monkeypatch, capsys):
    class Silent(Echo):
        def __init__(self, *args, **how):
            super().__init__()

    monkeypatch.chdir(tmp_path)
    Path("nano.py").write_text(
        "from dflop_jax import Config, ModelConfig\n"
        "def config():\n    return Config(model=ModelConfig(size='nano'), cache_dir='cache')\n"
    )
    monkeypatch.setattr("dflop_jax.generate.generate.Generator", Silent)
    lines = iter(["Two?\n", ""])
    typed = SimpleNamespace(readline=lambda: next(lines), isatty=lambda: False)
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["generate", "nano.py", "--prompt", "One?", "--chat"]) == 0
    assert capsys.readouterr().out == "after 1\nafter 3\n"
