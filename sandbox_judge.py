"""The judge: holds the tests, runs them against a stub module named `solution`, and reports to the
supervisor. What the tests take from the stub is asked of the solution process over the wire. Forked by
sandbox_inside.py; not launched by hand.

The tests are run by sandbox_runner.py, a script test.sh by sandbox_verifier.py.

Left out: capturing what the solution prints.
"""
import base64
import builtins
import json
import socket
import sys
import types

from sandbox_handles import Peer, RemoteType
from sandbox_offers import Offers
from sandbox_runner import Unsupported, run_pytest, run_tests, text_of
from sandbox_trust import Trust
from sandbox_verifier import run_verifier
from sandbox_wire import Broken, Unplain, Wire, recv_frame, send_frame, write_files

MAX_JOB = 256 << 20  # bytes, what the supervisor may send
MAX_REQUESTS = 100_000  # of a solution, in one run


class Unfit(BaseException):
    """Ends a test that cannot pass. The judge also notes why: a test that catches this fails all the same."""


class SolutionFunction:
    """A function of the solution as the tests see it."""

    def __init__(self, judge: "Judge", name: str):
        self._judge, self.__name__, self.__qualname__, self.__module__ = judge, name, name, "solution"

    def __call__(self, *args, **kwargs):
        return self._judge.exchange({"op": "call", "name": self.__name__}, (args, kwargs))

    @property
    def __doc__(self):
        return self._judge.operate("get", "__doc__", self)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in ("__wrapped__", "__annotations__", "__defaults__", "__kwdefaults__"):
            raise AttributeError(f"function {self.__name__!r} has no attribute {name!r}")
        return self._judge.operate("get", name, self)


class SolutionModule(types.ModuleType):
    def __init__(self, judge: "Judge"):
        super().__init__("solution")
        self.__judge__ = judge  # no name that a solution is likely to use

    def __getattr__(self, name: str) -> object:
        if name == "__all__":
            return [name for name in self.__judge__.names if self.__judge__.crosses(name)]
        if name.startswith("__"):
            raise AttributeError(f"module 'solution' has no attribute {name!r}")
        return self.__judge__.get(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self.__judge__.operate("set", name, None, (value,))

    def __delattr__(self, name: str) -> None:
        self.__judge__.operate("del", name, None)


class TestOffers(Offers):
    def present(self, value: object) -> tuple:
        if type(value) is SolutionFunction:
            return "name", "solution", value.__name__
        return super().present(value)


class Judge(Peer):
    """Asks the solution process and keeps what the verdict needs."""

    def __init__(self, wire: Wire, job: dict, folder: str):
        offers = TestOffers(folder)
        super().__init__(wire, offers, offers.perform, folder)
        self.collect, self.trust, self.requests = job["collect"], Trust(self.handles, job["trust"]), 0
        self.functions: dict[str, SolutionFunction] = {}
        self.originals: dict[tuple[int, str], object] = {}  # (id of module or class, name) -> before a test set it
        self.names: list[str] = []  # what a star import may bring
        self.unfit = ""  # why the running test cannot pass
        self.gone = ""  # why the solution answers no more
        self.protocol = ""  # what nonsense it sent
        self.oom = False
        self.results: dict[str, str] = {}
        self.message = ""  # of the first test that did not pass

    def get(self, name: str) -> object:
        if self.collect:
            return self.functions.setdefault(name, SolutionFunction(self, name))
        return self.operate("get", name, None)

    def crosses(self, name: str) -> bool:
        try:
            self.get(name)
        except Unfit:
            self.unfit = ""
            return False
        return True

    def operate(self, op: str, name: str, target: object, args: tuple = (), kwargs: dict | None = None) -> object:
        refused = self.trust.refuses(op, name, target, args)
        if refused is NotImplemented:
            return NotImplemented
        if refused:
            raise AttributeError(name) if name.startswith("__") else self.fail(refused)
        place = id(target), name
        if op == "del" and place in self.originals:  # patchers undo so, having found nothing in a stub's __dict__
            op, args = "set", (self.originals.pop(place),)
        elif op == "set" and (target is None or type(target) is RemoteType) and place not in self.originals:
            try:
                self.originals[place] = self.operate("get", name, target)
            except AttributeError:  # a new name
                pass
        return self.exchange({"op": op, "name": name}, self.packed(target, args, kwargs))

    def exchange(self, request: dict, value: tuple) -> object:
        """Ask, and take the answer for what it is."""
        op, name = request["op"], request["name"]
        if self.gone:
            raise self.fail(self.gone)
        half_read, self.handles.arrived = self.handles.arrived, []  # of the message that this one interrupts
        try:
            reply, answer = self.ask(request, value)
            if self.handles.arrived:
                answer = self.trust.receive(f"{op} {name}", answer, value, self.depth == 0)
            elif self.depth == 0:
                self.trust.count(f"{op} {name}")
            if "raise" in reply and not isinstance(answer, BaseException):
                raise Broken("an exception that is none")
        except Unplain as exc:
            raise self.fail(f"unsupported argument for solution.{name}: {exc}") from None
        except (EOFError, OSError):
            self.gone = "the solution process ended before it answered"
            raise self.fail(self.gone) from None
        except Broken as exc:
            self.gone = self.protocol = f"the solution broke the protocol: {exc}"
            raise self.fail(self.gone) from None
        finally:
            self.handles.arrived = half_read
        if "raise" in reply:
            self.oom = self.oom or type(answer) is MemoryError
            if isinstance(answer, KeyboardInterrupt):  # would stop a whole pytest session
                raise self.fail(f"solution.{name} raised KeyboardInterrupt")
            ends = op == "special" and name in ("__next__", "send", "throw")
            if isinstance(answer, StopIteration) and not ends and not self.trust.stops(f"{op} {name}"):
                # or `for result in map(f, cases)` would end before its cases do
                raise self.fail(f"solution.{name} raised StopIteration where the reference did not")
            raise answer
        if "memory" in reply:
            self.oom = True
            raise self.fail(f"solution.{name} ran out of memory")
        if "unplain" in reply:
            raise self.fail(f"solution.{name} returned an unsupported value of type {str(reply['unplain'])[:100]}")
        if "missing" in reply:
            raise AttributeError(f"module 'solution' has no attribute {name!r}")
        if "callable" in reply:
            return self.functions.setdefault(name, SolutionFunction(self, name))
        return answer

    def serve(self, request: dict, value: object) -> None:
        self.requests += 1
        if self.requests > MAX_REQUESTS:
            raise Broken(f"more than {MAX_REQUESTS} requests")
        if type(value) is not tuple or len(value) != 3 or type(request.get("name")) is not str:
            raise Broken("a malformed request")
        self.trust.lower()
        super().serve(request, value)

    def refuse(self, reason: str) -> "Unfit":
        return self.fail(f"unsupported: {reason}")

    def fail(self, reason: str) -> Unfit:
        self.unfit = self.unfit or reason
        return Unfit(reason)

    def note(self, test: str, outcome: str, message: str) -> None:
        if self.unfit and outcome != "error":
            outcome, message = "failed", self.unfit
        self.unfit = ""
        self.trust.test = ""
        self.results[test] = outcome
        if outcome in ("failed", "error") and not self.message:
            self.message = f"{test}: {message[:1500]}"


def judge_process(supervisor: socket.socket, wire_socket: socket.socket, folder: str) -> None:
    """Wait until the solution's walls stand, take the job, run the tests, report."""
    wire = Wire(wire_socket, parity=0)
    try:
        hello, _ = wire.recv()
    except (EOFError, OSError, Broken):
        hello = {"setup": "the solution process ended before it was set up"}
    send_frame(supervisor, json.dumps(hello).encode())
    if "ready" not in hello:
        return
    job = json.loads(recv_frame(supervisor, MAX_JOB))
    if job["runner"] == "verifier":
        report = {"error": "", "names": [], "trust": None, "tests": {}, "message": "", "gone": False, "oom": False}
        send_frame(supervisor, json.dumps(report | run_verifier(wire, job, folder)).encode())
        return
    judge = Judge(wire, job, folder)
    report: dict = {"error": "", "unsupported": "", "names": []}
    tests = {name: base64.b64decode(data) for name, data in job["tests"].items()}
    try:
        wire.send({}, {name: base64.b64decode(data) for name, data in job["files"].items()})
        reply, value = wire.recv()
        if "raise" in reply:
            judge.oom = type(value) is MemoryError
            place = f" ({reply['raise']})" if reply["raise"] else ""
            text = f"{type(value).__name__}: {text_of(value)}{place}"
            report["error"] = f"the solution cannot be imported: {text}"
        else:
            report["names"] = [str(name) for name in reply["names"]]
    except (EOFError, OSError):
        judge.gone = report["error"] = "the solution ended while it was imported"
    except (Broken, Unplain, KeyError, TypeError) as exc:
        report["error"] = f"the solution broke the protocol: {exc}"
    if not report["error"]:
        # the names of the reference alone, or a star import could replace the tests' own `all` or `len`
        allowed = job["names"] if job["names"] is not None else set(report["names"]) - set(vars(builtins))
        judge.names = [name for name in report["names"] if name in allowed]
        sys.modules["solution"] = SolutionModule(judge)
        write_files(folder, tests)
        try:
            (run_pytest if job["runner"] == "pytest" else run_tests)(judge, tests, folder)
        except Unsupported as exc:
            report["unsupported"] = str(exc)
        report["error"] = judge.protocol
    report["error"] = report["error"][:2000]
    report |= {"trust": judge.trust.record, "tests": judge.results, "message": judge.message}
    report |= {"gone": bool(judge.gone), "oom": judge.oom}
    sys.stdout.flush()
    sys.stderr.flush()
    send_frame(supervisor, json.dumps(report).encode())
