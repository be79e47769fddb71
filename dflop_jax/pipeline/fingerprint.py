"""A word for all that a program is made of, without tracing it: equal words, equal programs.

It is taken from the very objects that a program is traced from: the values that they hold, and the
code by its name. So it is good as far as that code is known: of packages whose source, or version,
goes into the word, too. Code from elsewhere, and a value of a kind that is not known here, have no
word, and their programs are traced.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")  # known by their version
# Whose source is hashed. A model of others is not known: it may read what it likes where it traces.
SOURCES = ("dflop_jax", "models")
_KNOWN = frozenset((*LIBRARIES, *SOURCES, *(sys.stdlib_module_names - {"__main__"})))
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...))


class UnknownPart(Exception):
    """Something that a program is made of has no word."""


@runtime_checkable
class MadeOf(Protocol):
    """An object that says what its programs are made of; what else it holds follows from that, or
    is kept to save time."""

    @property
    def made_of(self) -> tuple[Any, ...]: ...


def fingerprint(*parts: Any) -> str:
    """The word for some values.

    Raises:
      UnknownPart: one of them, or what it holds, has none.
    """
    return _Walk().word(parts)


class _Walk:
    """One walk through values. An object that is met again is named by its number: it is not walked
    twice, and circles end."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # so that no number is given to another object

    def word(self, value: Any) -> str:
        digest = hashlib.sha256()
        for piece in self._pieces(value):
            digest.update(len(piece).to_bytes(8, "big"))
            digest.update(piece)
        return digest.hexdigest()

    def _pieces(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, _PLAIN):
            yield f"{type(value).__name__} {value!r}".encode()
        elif isinstance(value, enum.Enum):
            yield f"{_name_of(type(value))} {value.name}".encode()
        elif isinstance(value, (type, np.ufunc)):
            yield _name_of(value).encode()
        elif isinstance(value, np.dtype):
            yield f"dtype {value.name} {value.str}".encode()
        else:
            number = self._numbers.setdefault(id(value), len(self._numbers))
            yield f"{type(value).__qualname__} {number}".encode()
            if number == len(self._held):
                self._held.append(value)
                yield from self._of_object(value)

    def _all(self, *values: Any) -> Iterator[bytes]:
        yield str(len(values)).encode()
        for value in values:
            yield from self._pieces(value)

    def _of_object(self, value: Any) -> Iterator[bytes]:
        for kinds, parts in _PARTS:
            if isinstance(value, kinds):
                yield from self._all(*parts(value))
                return
        if isinstance(value, (set, frozenset)):
            words = (_Walk().word(item) for item in value)
            yield from self._all(*sorted(words))
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif name := _global_name(value):
            yield name.encode()
        elif isinstance(value, MadeOf):
            yield from self._all(type(value), *value.made_of)
        elif dataclasses.is_dataclass(value):
            fields = (f.name for f in dataclasses.fields(value))
            yield from self._all(type(value), *((n, getattr(value, n, None)) for n in fields))
        elif not getattr(value, "__dict__", True) and not getattr(value, "__slots__", ()):
            yield from self._all(type(value))  # a mark, which is nothing but itself
        else:
            raise UnknownPart(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _function(self, function: FunctionType) -> Iterator[bytes]:
        """A function by its name and line, with what it closes over."""
        name, code = _name_of(function), function.__code__
        yield f"{name} {code.co_firstlineno} {code.co_name}".encode()
        cells = [_content(cell) for cell in function.__closure__ or ()]
        yield from self._all(*cells, function.__defaults__, function.__kwdefaults__)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return ...


def _name_of(named: Any) -> str:
    """The full name of a class or function whose code is known."""
    module = getattr(named, "__module__", None) or ("numpy" if isinstance(named, np.ufunc) else "")
    if module.partition(".")[0] not in _KNOWN:
        raise UnknownPart(f"{module}.{getattr(named, '__qualname__', named)}")
    return f"{module}.{getattr(named, '__qualname__', None) or named.__name__}"


def _global_name(value: Any) -> str:
    """The name that known code has for an object, such as a jitted function; "" if none."""
    module, name = (getattr(value, n, None) for n in ("__module__", "__name__"))
    if not isinstance(module, str) or not isinstance(name, str):
        return ""
    is_known = getattr(sys.modules.get(module), name, None) is value
    return _name_of(value) if is_known else ""


def _of_array(array: Any) -> tuple[Any, ...]:
    on_host = np.asarray(array)
    if on_host.dtype.hasobject:
        raise UnknownPart("an array of objects")
    return on_host.dtype, on_host.shape, on_host.tobytes()


def _of_jax_array(array: jax.Array) -> tuple[Any, ...]:
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        raise UnknownPart("an array that is not here")
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise UnknownPart("a key")
    return (array.sharding, *_of_array(array))


def _of_device(device: jax.Device) -> tuple[Any, ...]:
    return device.id, device.process_index, device.platform, device.device_kind


_PARTS: list[tuple[Any, Callable[[Any], tuple[Any, ...]]]] = [
    (PartitionSpec, tuple),
    (jax.Array, _of_jax_array),
    ((np.ndarray, np.generic), _of_array),
    (jax.ShapeDtypeStruct, lambda s: (s.shape, s.dtype, s.sharding, s.weak_type)),
    (NamedSharding, lambda s: (s.mesh, s.spec, s.memory_kind)),
    (jax.sharding.SingleDeviceSharding, lambda s: (*s.device_set, s.memory_kind)),
    (Mesh, lambda m: (m.axis_names, m.axis_types, m.devices.shape, *m.devices.flat)),
    (jax.Device, _of_device),
    ((tuple, list), lambda items: (type(items), *items)),
    (Mapping, lambda items: tuple(items.items())),
    (partial, lambda p: (p.func, p.args, p.keywords)),
    (MethodType, lambda m: (m.__func__, m.__self__)),
]
