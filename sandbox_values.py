"""Values of the standard library and of numpy that cross the wire by content: each has one exact type, is taken
apart into plain values, and is put together by its own constructor. Not launched by hand.

Left out: arrays of objects and of records; time zones other than fixed offsets and names of the tz database.
"""
import collections
import datetime
import decimal
import fractions
import pathlib
import re
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable

STANDARD = {  # exact type -> its parts, as arguments of `build`
    decimal.Decimal: lambda v: (str(v),),
    fractions.Fraction: lambda v: (v.numerator, v.denominator),
    datetime.timedelta: lambda v: (v.days, v.seconds, v.microseconds),
    datetime.date: lambda v: (v.year, v.month, v.day),
    datetime.time: lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold),
    datetime.datetime: lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo,
                                  v.fold),
    datetime.timezone: lambda v: (v.utcoffset(None), v.tzname(None)),
    zoneinfo.ZoneInfo: lambda v: (v.key,),
    uuid.UUID: lambda v: (v.hex,),
    re.Pattern: lambda v: (v.pattern, v.flags),
    slice: lambda v: (v.start, v.stop, v.step),
    types.NotImplementedType: lambda v: (),
    pathlib.PosixPath: lambda v: (str(v),),
    pathlib.PurePosixPath: lambda v: (str(v),),
    pathlib.PureWindowsPath: lambda v: (str(v),),
}
BUILD: dict[str, Callable] = {kind.__name__: kind for kind in STANDARD} | {
    "time": lambda *parts: datetime.time(*parts[:-1], fold=parts[-1]),
    "datetime": lambda *parts: datetime.datetime(*parts[:-1], fold=parts[-1]),  # noqa: DTZ001, the zone is in it
    "timezone": lambda offset, name: datetime.UTC if name == "UTC" and not offset
        else datetime.timezone(offset, name),
    "Pattern": lambda pattern, flags: re.compile(pattern, flags),
    "NotImplementedType": lambda: NotImplemented,
}
# classes that cross by name, each way: building one of their instances does nothing else
CLASSES = {kind.__name__: kind for kind in (
    bool, int, float, complex, str, bytes, bytearray, list, dict, set, tuple, frozenset, object, range, slice,
    type(None), *STANDARD, collections.deque, collections.Counter, collections.OrderedDict,
    collections.defaultdict)}
CLASS_NAMES = {kind: name for name, kind in CLASSES.items()}


def take_apart(value: object) -> tuple[str, tuple] | None:
    """(tag, parts) of a value of one of these types, else None. Raises ValueError for an array whose dtype
    has no bytes of its own."""
    kind = type(value)
    if kind in STANDARD:
        return kind.__name__, STANDARD[kind](value)
    numpy = sys.modules.get("numpy")
    if numpy and (kind is numpy.dtype or issubclass(kind, numpy.dtype)):
        return "dtype", (dtype_name(value),)
    if numpy and issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
        return "scalar", (dtype_name(value.dtype), value.tobytes())
    return None


def put_together(tag: str, parts: list) -> object:
    """The value; ValueError, TypeError and the like if the parts are none of it."""
    if tag in BUILD:
        return BUILD[tag](*parts)
    if tag == "dtype":
        return read_dtype(parts[0])
    if tag == "scalar":
        import numpy
        return numpy.frombuffer(parts[1], read_dtype(parts[0]), 1)[0]
    raise ValueError("an unknown tag")


def is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def dtype_name(dtype) -> str:
    if dtype.hasobject or dtype.names or dtype.subdtype:
        raise ValueError(f"numpy data of dtype {dtype}")
    return dtype.str


def read_dtype(name: str):
    import numpy
    dtype = numpy.dtype(name)
    dtype_name(dtype)
    return dtype


def array_content(array) -> tuple:
    return dtype_name(array.dtype), array.shape, array.tobytes()


def build_array(name: str, shape: tuple, data: bytes):
    import numpy
    return numpy.frombuffer(data, read_dtype(name)).reshape(shape).copy()
