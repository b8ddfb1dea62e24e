"""The solution as the interpreters of a Harbor verifier (sandbox_verifier.py) see it: behind the stub
/app/solution.py, imported as a module or run as a script. Lies in the judge's namespace; not launched by hand.

What the solution raises must not end the script's interpreter as the script itself could: SystemExit(0) would be a
pass to whoever asks for the exit status.
"""
import builtins
import json
import socket
import sys
from collections.abc import Callable

from sandbox_judge import Judge, SolutionModule
from sandbox_verifier import NAMES, SOCKET
from sandbox_wire import Broken, Wire


class StubJudge(Judge):
    def exchange(self, request: dict, value: tuple) -> object:
        try:
            return super().exchange(request, value)
        except (SystemExit, GeneratorExit, StopAsyncIteration) as exc:
            raise self.fail(f"solution.{request['name']} raised {type(exc).__name__}") from None


def connect(request: bytes) -> Wire:
    """ "i": to a process that imports the solution; "s": to one that runs it as a script."""
    with socket.socket(socket.AF_UNIX) as judge:
        judge.connect(SOCKET)
        judge.sendall(request)
        judge.shutdown(socket.SHUT_WR)
        _, fds, _, _ = socket.recv_fds(judge, 1, 1)
    if not fds:
        raise ImportError("the solution's process is gone")
    return Wire(socket.socket(fileno=fds[0]), parity=0)


def import_solution() -> Callable[[str], object]:
    """The __getattr__ of the stub. ImportError when the solution cannot be imported."""
    try:
        wire = connect(b"i")
        wire.recv()
        wire.send({}, {})
        reply, value = wire.recv()
        if "raise" in reply:
            raise ImportError(f"the solution cannot be imported: {type(value).__name__}: {value} {reply['raise']}")
        names = [str(name) for name in reply["names"]]
    except (EOFError, OSError):
        raise ImportError("the solution ended while it was imported") from None
    except (Broken, KeyError, TypeError) as exc:
        raise ImportError(f"the solution broke the protocol: {exc}") from None
    with socket.socket(socket.AF_UNIX) as judge:
        judge.connect(SOCKET)
        judge.sendall(json.dumps(names).encode())
    with open(NAMES) as file:
        allowed = json.load(file)
    judge = StubJudge(wire, {"collect": False, "trust": None}, "/tests")
    # the reference's names alone, or a star import could replace the script's own
    judge.names = [name for name in names if (name not in vars(builtins) if allowed is None else name in allowed)]
    return SolutionModule(judge).__getattr__


def run_as_script() -> None:
    """As `python solution.py`: the same arguments, input, output and exit status."""
    try:
        wire = connect(b"s")
        wire.send({"arguments": sys.argv[1:]}, sys.stdin.buffer.read())
        reply, (output, errors) = wire.recv()
    except (EOFError, OSError):
        sys.exit("the solution's process ended before it answered")
    sys.stderr.buffer.write(errors)
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    sys.exit(reply["status"])
