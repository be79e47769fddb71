"""A source whose samples hurt who decodes them: opened by name in the decoding processes."""

import logging
import os
import signal
import sys
import time

import msgspec
import numpy as np

from dflop_jax.data import BadSample, ByteTokenizer
from dflop_jax.data.datasets.index_build import LocalRowReader
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.process_pool import DecoderReply
from dflop_jax.data.sample import FeatureGather, Sample, SourceFactory
from dflop_jax.data.text.tokenize import encode_chatml
from dflop_jax.records import Load


def hurt(index, harm, argument):
    if harm == "hang":
        time.sleep(1000)
    elif harm == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif harm == "die once" and not os.path.exists(argument):
        open(argument, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    elif harm == "eat":
        try:
            np.ones(int(argument), np.uint8)
        except MemoryError as e:
            raise ValueError(f"number {index} eats memory") from e
    elif harm == "bad":
        raise ValueError(f"number {index} is bad")
    elif harm == "bug":
        raise ZeroDivisionError("a bug")


class Hostile:
    """Sample i holds numbers i; those of `harm` (by index, as text: JSON) do what it says."""

    name = "hostile"

    def __init__(self, n, harm, size=3):
        self._n, self._harm, self._size = n, harm, size
        arguments = {"n": n, "harm": harm, "size": size}
        self.factory = SourceFactory(f"{__name__}:open_hostile", arguments)

    def __len__(self):
        return self._n

    def label(self, index):
        return f"number {index}"

    def load(self, index):
        return Load({"a": (self._size,), "b": (2,)})

    def sample(self, index):
        harm, _, argument = self._harm.get(str(index), "").partition(":")
        hurt(index, harm, argument)
        if harm == "keep":
            self.kept = np.ones(int(argument), np.uint8)
        elif harm == "lie":
            return Sample({}, {}, Load({"a": (9,)}))
        elif harm == "warn":
            logging.getLogger("dflop_jax.data").warning("number %d is odd", index)
        elif harm == "modules":
            assert "jax" not in sys.modules
            index = os.getpid()
        a = np.full((self._size, 2), index, np.float32)
        fields = {"a": {"x": a, "flag": np.array([index % 2 == 0])}, "b": {"y": np.arange(2)}}
        weight = np.full((2, 2), 0.5, np.float32)
        places = {("a", "b"): FeatureGather(np.full((2, 2), index, np.int32), weight),
                  ("b", "a"): FeatureGather(np.zeros((self._size, 1), np.int32))}  # fmt: skip
        return Sample(fields, places, self.load(index))


def open_hostile(arguments):
    return Hostile(**arguments)


def open_hostile_rows(arguments):
    """As `build.open_row_reader`, of a dataset file; records of `harm` do what it says."""
    reader = open_reader(arguments["path"])
    here = LocalRowReader({"a": reader}, lambda turns, _: encode_chatml(turns, ByteTokenizer()))

    def answer(request):
        rows = list(here.answer(request).rows)
        for k, at in enumerate(msgspec.json.decode(request)[1]):
            harm, _, argument = arguments["harm"].get(str(at["number"]), "").partition(":")
            try:
                hurt(at["number"], harm, argument)
            except ValueError as e:
                rows[k] = BadSample(f"{at['label']}: {e}")
            if harm == "warn":
                logging.getLogger("dflop_jax.data").warning("odd")
        return DecoderReply(rows=tuple(rows))

    return answer
