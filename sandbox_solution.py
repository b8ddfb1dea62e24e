"""The solution process: imports the module `solution` and answers the judge, one message at a time. Forked by
sandbox_inside.py, behind its walls; not launched by hand.
"""
import copy
import functools
import importlib
import operator
import os
import socket
import sys
import types

from sandbox_handles import SPECIAL, Peer
from sandbox_verifier import serve
from sandbox_wire import Wire, describe, write_files

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial,
             type(functools.lru_cache(len)))  # what a test sees as a function of the module
OF_CLASSES = {"__iter__": iter, "__len__": len, "__getitem__": operator.getitem, "__contains__": operator.contains}


class Offers:
    """What the solution's objects are to the judge: all that they are here."""

    def __init__(self):
        self.functions: dict[str, object] = {}  # of the module, as the judge has met them

    def present(self, value: object) -> tuple:
        if isinstance(value, type):
            return ("class",)
        return ("gen",) if type(value) is types.GeneratorType else ("obj",)

    def special_names(self, kind: type) -> list[str]:
        return [name for name in SPECIAL if name in vars(kind)]

    def named(self, module: str, name: str) -> object:
        if module == "solution":
            return self.functions[name]
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))


class SolutionPeer(Peer):
    def __init__(self, wire: Wire, folder: str):
        offers = Offers()
        super().__init__(wire, offers, self.perform, folder)
        self.functions, self.pid = offers.functions, os.getpid()

    def perform(self, request: dict, value: tuple) -> tuple[dict, object]:
        """Carry out a request; a target of None is the module itself."""
        op, name, module = request["op"], request["name"], sys.modules.get("solution")
        if op == "call":
            return {}, self.functions[name](*value[0], **value[1])
        target, args, kwargs = value
        if op == "get" and target is None:
            try:
                found = getattr(module, name)
            except AttributeError:
                return {"missing": True}, None
            if type(found) not in FUNCTIONS or self.is_proxy(found):
                return {}, found
            self.functions[name] = found
            return {"callable": True}, None
        if op == "get":
            return {}, getattr(target, name)
        if op == "set":
            return {}, setattr(module if target is None else target, name, args[0])
        if op == "del":
            return {}, delattr(module if target is None else target, name)
        if op == "copy":
            return {}, getattr(copy, name)(target)
        if op == "invoke":
            return {}, target(*args, **dict(kwargs))
        if isinstance(target, type):
            return {}, OF_CLASSES[name](target, *args)
        return {}, getattr(type(target), name)(target, *args, **dict(kwargs))

    def reply(self, reply: dict, value: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the solution may have replaced or closed it
                pass
        if os.getpid() != self.pid:  # a child that the solution forked and let run on
            os._exit(0)
        super().reply(reply, value)


def solution_process(sock: socket.socket, folder: str) -> None:
    """Write the solution's files, import `solution`, then answer until the judge hangs up."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    wire = Wire(sock, parity=1)
    peer = SolutionPeer(wire, folder)
    wire.send({"ready": True})
    request, files = wire.recv()
    if "serve" in request:
        write_files(folder, files)
        serve(sock, folder, solution_process)
    try:
        write_files(folder, files)
        module = importlib.import_module("solution")
        public = [name for name in vars(module) if not name.startswith("_")]
        reply, value = {"names": vars(module).get("__all__", public)}, None
    except BaseException as exc:  # noqa: BLE001, whatever the solution raises
        reply, value = describe(exc, folder)
    with peer.turn:
        peer.reply(reply, value)
        reply = value = files = None
        while True:
            try:
                request, value = wire.recv()
            except EOFError:
                os._exit(0)
            peer.serve(request, value)
            request = value = None
