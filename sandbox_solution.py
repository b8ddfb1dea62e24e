"""The solution process: imports the module `solution` and answers the judge, one message at a time. Forked by
sandbox_inside.py, behind its walls; not launched by hand.
"""
import importlib
import os
import socket
import sys

from sandbox_verifier import serve
from sandbox_wire import Unplain, Wire, describe, write_files


def solution_process(sock: socket.socket, folder: str) -> None:
    """Write the solution's files, import `solution`, then answer until the judge hangs up."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    wire, me = Wire(sock, parity=1), os.getpid()
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
    while True:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the solution may have replaced or closed it
                pass
        if os.getpid() != me:  # a child that the solution forked and let run on
            os._exit(0)
        try:
            wire.send(reply, value)
        except Unplain as exc:
            wire.send({"unplain": str(exc)}, changes=False)
        except MemoryError:
            wire.send({"memory": True}, changes=False)
        reply = value = None
        try:
            request, arguments = wire.recv()
        except EOFError:
            os._exit(0)
        try:
            attribute = getattr(module, request["name"])
            if request["op"] == "call":
                reply, value = {}, attribute(*arguments[0], **arguments[1])
            elif callable(attribute):
                reply = {"callable": True}
            else:
                reply, value = {}, attribute
        except BaseException as exc:  # noqa: BLE001, whatever the solution raises
            if request["op"] == "get" and type(exc) is AttributeError:
                reply, value = {"missing": True}, None
            else:
                reply, value = describe(exc, folder)
        request = arguments = attribute = None
