"""Runs a task's tests in the judge (sandbox_judge.py), which is told of each outcome. Not launched by hand.

An own small runner knows test functions, Test classes, unittest.TestCase, parametrize and setup_method; for fixtures,
other marks and conftest.py, Unsupported, the supervisor asks for real pytest, which takes longer.
"""
import inspect
import itertools
import os
import sys
import traceback
import types
import unittest
from collections.abc import Callable
from functools import partial

from sandbox_handles import RemoteObject, RemoteType


class Unsupported(Exception):
    """The own runner does not understand these tests."""


def is_test_file(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def run_tests(judge, tests: dict[str, bytes], folder: str) -> None:
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


def run_class(judge, item: type, prefix: str, folder: str) -> None:
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


def cases(judge, test: str, function: types.FunctionType, skip: int) -> list[tuple[str, dict]]:
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


def run_one(judge, test: str, call: Callable[[], object], folder: str) -> None:
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
    def __init__(self, judge, prefix: str, folder: str):
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


def run_test_case(judge, item: type, prefix: str, folder: str) -> None:
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
    def __init__(self, judge):
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


def run_pytest(judge, tests: dict[str, bytes], folder: str) -> None:
    """Real pytest, for fixtures, marks and conftest files."""
    import pytest
    os.chdir(folder)
    arguments = ["--rootdir", os.path.dirname(folder), "--import-mode=importlib", "-p", "no:cacheprovider",
                 "-p", "no:terminal", *(["--collect-only"] if judge.collect else []), folder]
    pytest.main(arguments, plugins=[PytestPlugin(judge)])
