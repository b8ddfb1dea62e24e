"""The judge: holds the tests, runs them against a stub module named `solution`, and reports to the
supervisor. What the tests take from the stub is asked of the solution process over the wire. Forked by
sandbox_inside.py; not launched by hand.

Tests run in an own small runner (test functions, Test classes, unittest.TestCase, parametrize, setup_method);
for fixtures, other marks and conftest.py the supervisor asks for real pytest, which takes longer.

Left out: capturing what the solution prints.
"""
import base64
import builtins
import inspect
import itertools
import json
import os
import socket
import sys
import traceback
import types
import unittest
from collections.abc import Callable
from functools import partial

from sandbox_handles import Peer, RemoteObject, RemoteType
from sandbox_offers import Offers
from sandbox_trust import Trust
from sandbox_verifier import run_verifier
from sandbox_wire import Broken, Unplain, Wire, recv_frame, send_frame, write_files

MAX_JOB = 256 << 20  # bytes, what the supervisor may send
MAX_REQUESTS = 100_000  # of a solution, in one run


class Unfit(BaseException):
    """Ends a test that cannot pass. The judge also notes why: a test that catches this fails all the same."""


class Unsupported(Exception):
    """The own runner does not understand these tests."""


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


def is_test_file(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def run_tests(judge: Judge, tests: dict[str, bytes], folder: str) -> None:
    """The own runner. Unsupported when the tests hold something that it does not understand."""
    if any(path.endswith("conftest.py") for path in tests):
        raise Unsupported("conftest.py")
    for path in sorted(filter(is_test_file, tests)):
        if b"fixture" in tests[path]:
            raise Unsupported("a fixture")
        module = types.ModuleType(path.rpartition("/")[2].removesuffix(".py"))
        module.__file__ = os.path.join(folder, path)
        sys.modules[module.__name__] = module
        sys.path.insert(0, os.path.dirname(module.__file__))
        try:
            exec(compile(tests[path], module.__file__, "exec"), vars(module))  # noqa: S102
        except BaseException as exc:  # noqa: BLE001, what tests raise or a solution made them raise
            judge.note(f"tests/{path}", "error", explain(exc, folder))
            continue
        for name in ("pytestmark", "setup_module", "teardown_module", "setup_function", "teardown_function",
                     "setUpModule", "tearDownModule", "load_tests", "__test__"):
            if name in vars(module):
                raise Unsupported(name)
        for name, item in list(vars(module).items()):
            if type(item) is RemoteType:
                continue
            if inspect.isclass(item) and issubclass(item, unittest.TestCase):
                run_test_case(judge, item, f"tests/{path}::{name}", folder)
            elif inspect.isclass(item) and name.startswith("Test"):
                run_class(judge, item, f"tests/{path}::{name}", folder)
            elif inspect.isfunction(item) and name.startswith("test"):
                test = f"tests/{path}::{name}"
                for suffix, arguments in cases(judge, test, item, 0):
                    run_one(judge, test + suffix, partial(item, **arguments), folder)


def run_class(judge: Judge, item: type, prefix: str, folder: str) -> None:
    for name in ("pytestmark", "__init__", "__new__", "setup_class", "teardown_class", "__test__"):
        if any(name in vars(base) for base in item.__mro__[:-1]):
            raise Unsupported(f"{name} in a class")
    names = dict.fromkeys(name for base in reversed(item.__mro__[:-1]) for name in vars(base))
    for name in names:
        function = getattr(item, name)
        if inspect.isclass(function) and name.startswith("Test"):
            raise Unsupported("a class in a class")
        if not name.startswith("test") or not callable(function):
            continue
        if not inspect.isfunction(function) or isinstance(inspect.getattr_static(item, name), staticmethod):
            raise Unsupported("a test that is no plain method")

        def call(name: str, arguments: dict) -> None:
            instance = item()
            for hook in ("setup_method", "teardown_method"):
                if hook in names and len(inspect.signature(getattr(instance, hook)).parameters):
                    raise Unsupported(f"{hook} with an argument")
            if "setup_method" in names:
                instance.setup_method()
            try:
                getattr(instance, name)(**arguments)
            finally:
                if "teardown_method" in names:
                    instance.teardown_method()

        for suffix, arguments in cases(judge, f"{prefix}::{name}", function, 1):
            run_one(judge, f"{prefix}::{name}{suffix}", partial(call, name, arguments), folder)


def cases(judge: Judge, test: str, function: types.FunctionType, skip: int) -> list[tuple[str, dict]]:
    """The calls of a test function: id suffix and arguments, one for each row of its parametrize marks."""
    try:
        return expand(function, skip)
    except Unsupported:
        raise
    except BaseException as exc:  # noqa: BLE001, rows that the solution made may do anything
        judge.note(test, "error", text_of(exc))
        return []


def expand(function: types.FunctionType, skip: int) -> list[tuple[str, dict]]:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise Unsupported("an async or generator test")
    rows: list[tuple[list[str], dict]] = [([], {})]
    for mark in vars(function).get("pytestmark", []):
        if mark.name != "parametrize" or len(mark.args) != 2 or set(mark.kwargs) - {"ids"}:
            raise Unsupported(f"mark {mark.name}")
        names, values = mark.args
        names = [n.strip() for n in names.split(",") if n.strip()] if isinstance(names, str) else list(names)
        values = [row if len(names) > 1 or type(row).__name__ == "ParameterSet" else (row,)
                  for row in values]
        if any(type(row).__name__ == "ParameterSet" and row.marks for row in values):
            raise Unsupported("a mark on one parameter")
        values = [row.values if type(row).__name__ == "ParameterSet" else row for row in values]
        rows = [(label + [str(number)], arguments | dict(zip(names, row, strict=True)))
                for label, arguments in rows for number, row in enumerate(values)]
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    wanted = [p.name for p in parameters if p.default is p.empty]
    if any(set(arguments) != set(wanted) for _, arguments in rows):
        raise Unsupported(f"argument {', '.join(wanted)} of {function.__name__}")
    return [("[" + "-".join(label) + "]" if label else "", arguments) for label, arguments in rows]


def run_one(judge: Judge, test: str, call: Callable[[], object], folder: str) -> None:
    if judge.collect:
        judge.results[test] = "passed"
        return
    judge.trust.test = test
    try:
        call()
        judge.note(test, "passed", "")
    except Unsupported:
        raise
    except BaseException as exc:  # noqa: BLE001, SystemExit and its like fail the test that met them
        skipped = not isinstance(exc, RemoteObject) and (
            isinstance(exc, unittest.SkipTest) or type(exc).__qualname__ == "Skipped")  # pytest's
        judge.note(test, "skipped" if skipped else "failed", explain(exc, folder))


class CaseResult(unittest.TestResult):
    def __init__(self, judge: Judge, prefix: str, folder: str):
        super().__init__()
        self.judge, self.prefix, self.folder = judge, prefix, folder

    def name(self, test: unittest.TestCase) -> str:
        return f"{self.prefix}::{test.id().rpartition('.')[2]}"

    def startTest(self, test):
        super().startTest(test)
        self.judge.trust.test = self.name(test)

    def addSuccess(self, test):
        self.judge.note(self.name(test), "passed", "")

    def addFailure(self, test, err):
        self.judge.note(self.name(test), "failed", explain(err[1], self.folder))

    addError = addFailure

    def addSkip(self, test, reason):
        self.judge.note(self.name(test), "skipped", reason)

    def addExpectedFailure(self, test, err):
        self.judge.note(self.name(test), "xfailed", explain(err[1], self.folder))

    def addUnexpectedSuccess(self, test):
        self.judge.note(self.name(test), "failed", "an expected failure passed")

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.judge.note(self.name(test), "failed", explain(err[1], self.folder))


def run_test_case(judge: Judge, item: type, prefix: str, folder: str) -> None:
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(item)
    if judge.collect:
        judge.results |= {f"{prefix}::{test.id().rpartition('.')[2]}": "passed" for test in suite}
    else:
        suite.run(CaseResult(judge, prefix, folder))


def explain(exc: BaseException, folder: str) -> str:
    """Type, text, and the line of the tests where it happened."""
    where = ""
    for frame, line in traceback.walk_tb(exc.__traceback__):
        if frame.f_code.co_filename.startswith(folder):
            with open(frame.f_code.co_filename, encoding="utf-8", errors="replace") as file:
                source = next(itertools.islice(file, line - 1, None), "").strip()
            where = f" ({os.path.relpath(frame.f_code.co_filename, folder)}:{line}: {source})"
    text = text_of(exc)
    return f"{type(exc).__name__}{': ' * bool(text)}{text}{where}"


def text_of(exc: BaseException) -> str:
    try:
        return str(exc)[:1000]
    except BaseException:  # noqa: BLE001, a __str__ of the solution may do anything
        return "unprintable"


class PytestPlugin:
    def __init__(self, judge: Judge):
        self.judge = judge
        self.phases: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items):
        if self.judge.collect:
            self.judge.results = {item.nodeid: "passed" for item in items}

    def pytest_runtest_logstart(self, nodeid):
        self.judge.trust.test = nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.judge.note(report.nodeid, "error", report.longreprtext[-1500:])

    def pytest_runtest_logreport(self, report):
        expected_failure = "wasxfail" in vars(report)
        outcome = {"skipped": "xfailed", "passed": "xpassed"}[report.outcome] \
            if expected_failure and report.outcome != "failed" else report.outcome
        if outcome == "failed" and report.when != "call":
            outcome = "error"
        before = self.phases.get(report.nodeid)
        if before is None or before[0] == "passed":
            self.phases[report.nodeid] = outcome, report.longreprtext[-1500:]
        if report.when == "teardown":
            self.judge.note(report.nodeid, *self.phases[report.nodeid])


def run_pytest(judge: Judge, tests: dict[str, bytes], folder: str) -> None:
    """Real pytest, for fixtures, marks and conftest files."""
    import pytest
    os.chdir(folder)
    arguments = ["--rootdir", os.path.dirname(folder), "--import-mode=importlib", "-p", "no:cacheprovider",
                 "-p", "no:terminal", *(["--collect-only"] if judge.collect else []), folder]
    pytest.main(arguments, plugins=[PytestPlugin(judge)])
