"""A talk with a model: what is typed, what it says, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dflop_jax.generate.generate import Generator
from dflop_jax.generate.prompt import NO_MEDIA, Media, Talk, asked
from dflop_jax.generate.sampling import Sampling

NEW, IMAGE, VIDEO, AUDIO = "/new", "/image", "/video", "/audio"
HELP = (
    f"{NEW} begins another talk; {IMAGE}, {VIDEO} or {AUDIO} FILE is about the next question; end "
    "with Ctrl-D"
)


def chat(
    generator: Generator,
    lines: Iterable[str],
    how: Sampling,
    show: Callable[[str], None],
    media: Media = NO_MEDIA,
) -> Talk:
    """Answer line after line, each after all that were said before; returns the talk.

    A line that cannot be answered (a file that is not there, a talk that is too long) is said to be
    one, and as if it had not been typed.

    Args:
      show: gets the text of answers as it comes, and what is wrong with a line.
      media: files by kind that the first line is about.
    """
    talk, files = Talk(), {kind: [*given] for kind, given in media.items()}
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == NEW:
            talk, files = Talk(), {}
        elif word in (IMAGE, VIDEO, AUDIO):
            files.setdefault(word.removeprefix("/"), []).append(rest.strip())
        elif word.startswith("/"):
            show(f"{HELP}\n")
        elif word:
            try:
                question = asked(talk, line.strip(), files, generator.model)
                answer = generator.reply(question, how, show)
            except ValueError as e:
                show(f"{' '.join(str(e).split())}\n")
            else:
                talk = question.answered(answer.answer)
                show("\n")
            files = {}
    return talk
