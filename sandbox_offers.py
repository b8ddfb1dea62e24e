"""What the objects of the tests are to the solution: callables can be called, iterables iterated, and instances of
classes that the tests define show their public attributes and the operators that those classes define. Nothing
else: no name with an underscore in front, no frame, code, traceback or module, nothing of a function but its call.
Functions and classes of installed modules cross by name, so the solution's call of them stays with the solution.
Not launched by hand.
"""
import functools
import io
import sys
import types
import unittest.mock

from sandbox_handles import SPECIAL
from sandbox_wire import Unplain, type_name

SEALED = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType, types.CoroutineType,
          types.AsyncGeneratorType)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType,
             functools.partial)
NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
         types.WrapperDescriptorType)
FILES = (io.StringIO, io.BytesIO, io.TextIOWrapper, io.BufferedReader, io.BufferedWriter)
FILE_NAMES = {"read", "readline", "readlines", "write", "writelines", "seek", "tell", "truncate", "flush", "close",
              "getvalue", "closed", "name", "mode", "encoding", "readable", "writable", "seekable"}
MOCK_NAMES = {*dir(unittest.mock.MagicMock), *dir(unittest.mock.Mock()), "method_calls"}
GENERAL = ("__call__", "__iter__", "__next__", "__len__", "__enter__", "__exit__")


class Offers:
    def __init__(self, folder: str):
        self.folder = folder + "/"

    def own(self, kind: type) -> bool:
        """Whether the tests define this class."""
        return (getattr(sys.modules.get(kind.__module__), "__file__", None) or "").startswith(self.folder)

    def present(self, value: object) -> tuple:
        kind = type(value)
        if isinstance(value, SEALED):
            raise Unplain(type_name(value))
        if isinstance(value, NAMED) and (named := self.installed(value)):
            return ("name", *named)
        if isinstance(value, type):
            if self.own(value):
                return ("class",)
            raise Unplain(f"class {value.__qualname__}")
        if kind is types.GeneratorType:
            return ("gen",)
        if isinstance(value, FUNCTIONS):
            shown = value if isinstance(value, types.FunctionType) else None
            return "fun", shown.__name__ if shown else "function", shown.__doc__ if shown else None
        if self.own(kind) or isinstance(value, (BaseException, unittest.mock.NonCallableMock, *FILES)) or any(
                name in vars(base) for base in kind.__mro__ for name in ("__call__", "__iter__")):
            return ("obj",)
        raise Unplain(type_name(value))

    def installed(self, value: object) -> list[str] | None:
        """[module, name] of something that the solution process can import too."""
        owner = getattr(value, "__objclass__", None)
        module = owner.__module__ if owner else value.__module__
        found = sys.modules.get(module)
        if found is None or module.partition(".")[0].startswith(("sandbox_", "solution", "__main__", "_pytest")) or (
                getattr(found, "__file__", None) or "").startswith(self.folder):
            return None
        for name in value.__qualname__.split("."):
            found = getattr(found, name, None)
        return [module, value.__qualname__] if found is value else None

    def special_names(self, kind: type) -> list[str]:
        return [name for name in (SPECIAL if self.own(kind) else GENERAL) if name in vars(kind)]

    def named(self, module: str, name: str) -> object:
        raise ValueError("the judge imports nothing for a solution")

    def readable(self, target: object, name: str) -> bool:
        kind = target if isinstance(target, type) else type(target)
        if name.startswith("_"):
            return False
        if isinstance(target, FILES):
            return name in FILE_NAMES
        if isinstance(target, unittest.mock.NonCallableMock):
            return name not in MOCK_NAMES
        for base in kind.__mro__:
            if name in vars(base):
                return self.own(base)
        return self.own(kind) and (name in getattr(target, "__dict__", ()) or any(
            "__getattr__" in vars(base) and self.own(base) for base in kind.__mro__))

    def perform(self, request: dict, value: object) -> tuple[dict, object]:
        """Carry out a request of the solution, or TypeError, AttributeError when it is not offered."""
        op, name = request["op"], request["name"]
        target, args, kwargs = value
        kind = type(target)
        if op == "invoke" and self.invocable(target):
            return {}, target(*args, **dict(kwargs))
        if op == "get" and self.readable(target, name):
            return {}, getattr(target, name)
        if op == "set" and self.writable(target, name):
            return {}, setattr(target, name, args[0])
        if op == "special" and kind is types.GeneratorType and name in ("__next__", "send", "throw"):
            return {}, getattr(target, name)(*args)
        if op == "special" and name in SPECIAL and not isinstance(target, type):
            definer = next((base for base in kind.__mro__ if name in vars(base)), object)
            if name in self.special_names(definer):
                return {}, getattr(kind, name)(target, *args)
        if op in ("get", "set", "del"):
            raise AttributeError(f"{kind.__name__!r} object of the tests has no attribute {str(name)[:100]!r} to {op}")
        raise TypeError(f"{kind.__name__!r} object of the tests does not support this")

    def invocable(self, target: object) -> bool:
        if isinstance(target, type):
            return self.own(target)
        definer = next((base for base in type(target).__mro__ if "__call__" in vars(base)), object)
        return not self.own(type(target)) or self.own(definer) or isinstance(target, unittest.mock.NonCallableMock)

    def writable(self, target: object, name: str) -> bool:
        """Public data of an instance, not its methods."""
        kind = type(target)
        found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        return not name.startswith("_") and not isinstance(target, type) and self.own(kind) and not callable(found) \
            and not isinstance(found, (classmethod, staticmethod))
