"""Verdicts on untrusted code: a solution is run against a task's tests and has no say in the result.

Three parties. This file is the supervisor: it stands outside, holds the only clock that counts, and decides. For each
run, one warm interpreter forks a judge, which holds the tests and reports, and another forks the solution process,
which holds the solution and nothing else. sandbox_inside.py builds the walls around both, sandbox_judge.py asks
for the tests, which sandbox_runner.py runs, sandbox_solution.py answers, sandbox_wire.py is what passes between them:
plain values and those of sandbox_values.py by content; classes, instances, generators, callables and exceptions as
handles (sandbox_handles.py). sandbox_trust.py says what is believed of a handle, sandbox_offers.py what the tests'
objects show. sandbox_verifier.py is for tasks whose test is a script, test.sh.

Covered: a solution cannot read or change the tests, the judge, the result, other runs, the host's files or the
trainer's environment; it has no network, not even loopback. An object of the solution is never an instance of int,
str or list, and equals or orders with a plain value only where the reference, at the same call of the same test, gave
an object too; without a reference never. Of what the tests hand over it sees calls, iteration and public attributes
of the tests' own classes: no frame, code, closure, module or name with an underscore in front. Exits, skips, kills,
signals, hangs, floods of output, and excess of memory, processes, files or descriptors cost it a test or the run. All
that a run started or wrote is gone with the run, also when the trainer is killed.

Not covered: kernel bugs in what seccomp lets through; timing side channels; reading what every user of the machine
may read below /usr and the interpreter; tests too weak to tell right from wrong; a solution that stores what one test
taught it for the next. Tests are trusted to be no attack. Two objects of the solution compare by its word, and so
does one where the reference gave one: a test that asks no more than the solution's own __eq__ or __repr__ learns what
the solution says. A solution's generator that ends early ends a loop of the tests as it would anywhere. What does
not cross fails the test that meets it: classes of the tests that inherit from the solution's, coroutines, pickles,
arrays of objects, a message of more than 16 MB. A task whose reference needs these, or whose tests capture what the
solution prints, is infra; so is one that patches a static or class method of the solution and uses it afterwards.
Which rung of the ladder a machine allows, --check says. On "mounts" there is no network namespace, and seccomp denies
every socket. On "landlock" there is no namespace at all: a solution cannot fork, change file modes or use shared
memory; it sees names and sizes of the host's files, not their content; files of a run fill the temporary folder
without a common bound, and stay there when the worker itself is killed; started as root, its interpreter must be
readable by uid 65534. On the other rungs Landlock is added where the kernel has it. With isolation "none" there are
two processes and resource limits, none on the number of processes, and all else is open: it is for machines that
forbid the rest, with code that means no harm.

    python sandbox.py --solution solution.py --tests tests/ --json
    python sandbox.py --check
"""
import argparse
import json
import os
import re
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Self

import sandbox_inside
from sandbox_filter import landlock_abi
from sandbox_pool import OUTPUT_BYTES, Infra, Pool, make_job
from sandbox_probe import LEVELS, climb
from sandbox_runner import is_test_file
from sandbox_verifier import TEST, scored, stub_sources

OUTCOMES = ("passed", "failed", "error", "timeout", "oom", "infra")
PACKAGES = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


@dataclass(frozen=True)
class Verdict:
    """The result of one run."""
    outcome: str  # one of OUTCOMES
    reward: float | None  # None exactly on infra
    passed: int
    total: int
    seconds: float  # wall time after set-up
    output: str  # tail of what solution and tests printed, then the first failure; at most 4 kB
    tests: dict[str, str]  # test id -> passed, failed, error, missing
    ending: str = ""  # without a readable reward from a verifier, the name that Harbor gives it


@dataclass(frozen=True)
class Plan:
    """How to grade a task, as the reference's run told it."""
    runner: str  # "own", "pytest" or "verifier"
    names: tuple[str, ...] | None = None  # what `from solution import *` brings
    trust: dict | str | None = None  # where the reference gave objects of its own (sandbox_trust.py)
    expected: tuple[tuple[str, str], ...] = ()  # test ids with their outcomes
    fault: str = ""  # why the task cannot be graded


def readable(text: str) -> str:
    """The end of an output, without what differs from run to run by no doing of the solution."""
    text = re.sub(r"[^\s'\"]*/sandbox-(app|tests)-\w+", r"/\1", text)
    text = re.sub(r" at 0x[0-9a-f]+", " at 0x...", text)
    return text.encode(errors="replace")[-OUTPUT_BYTES:].decode(errors="ignore")


class Sandbox:
    """Grades solutions, at most `workers` at once. `isolation`: "auto" (the best that this machine allows, or
    RuntimeError) or "none". `reward`: "binary" or "pass_ratio" (on failed, the share of passed tests); what a
    test.sh gives counts as it is."""

    def __init__(self, workers: int = 2, timeout_s: float = 10.0, memory_mb: int = 512,
                 isolation: str = "auto", retries: int = 2, reward: str = "binary"):
        if isolation not in ("auto", *LEVELS):
            raise ValueError(f"isolation must be one of auto, {', '.join(LEVELS)}, not {isolation!r}")
        if reward not in ("binary", "pass_ratio"):
            raise ValueError(f'reward must be "binary" or "pass_ratio", not {reward!r}')
        if workers < 1 or timeout_s <= 0 or memory_mb < 64 or retries < 0:
            raise ValueError("needed: workers >= 1, timeout_s > 0, memory_mb >= 64, retries >= 0")
        self.timeout_s, self.reward = timeout_s, reward
        cpu_s = int(timeout_s * os.cpu_count()) + 60  # only for a supervisor that is gone or stopped
        self.settings = {"memory_mb": memory_mb, "cpu_s": cpu_s, "packages": PACKAGES,
                         "paths": sandbox_inside.visible_paths(PACKAGES)}
        self.plans: dict[str, Plan] = {}
        self.plan_locks: dict[str, threading.Lock] = {}
        self.lock = threading.Lock()
        first, self.level, self.found = climb(isolation, self.settings)
        self.settings["level"] = self.level
        self.pool = Pool(self.settings, workers, timeout_s, retries, first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the runs under way, then end every process. Later calls of grade raise RuntimeError."""
        self.pool.close()

    def grade(self, task, files: dict[str, str | bytes]) -> Verdict:
        """The verdict on `files` (paths below /app, normally solution.py). Blocks until a worker is free;
        call it from any thread. ValueError, naming the task, when it has no tests or a path leaves /app."""
        solution = solution_files(task.id, files)
        try:
            plan = self._plan(task)
            if plan.fault:
                raise Infra(plan.fault)
            return self._attempt(task, plan, solution)
        except Infra as exc:
            return Verdict("infra", None, 0, 0, 0.0, readable(str(exc)), {})

    def _plan(self, task) -> Plan:
        """The plan of a task, made at its first grade. Infra, and no plan is kept, when the machine fails."""
        with self.lock:
            lock = self.plan_locks.setdefault(task.id, threading.Lock())
        with lock:
            if task.id not in self.plans:
                self.plans[task.id] = self._make_plan(task)
            return self.plans[task.id]

    def _make_plan(self, task) -> Plan:
        if not gradable(task):
            raise ValueError(f"task {task.id}: no tests (tests/test_*.py or {TEST})")
        solution, verifier = reference(task), not any(map(is_test_file, test_files(task)))
        if verifier and self.level not in sandbox_inside.NAMESPACES:
            return Plan("verifier", fault=f"task {task.id}: {TEST} needs namespaces, isolation is {self.level}")
        if verifier and not solution:
            return Plan("verifier", expected=((TEST, "passed"),))
        for runner in ("verifier",) if verifier else ("own", "pytest"):
            report, _, _ = self._run(task, Plan(runner, trust="record" if solution else None),
                                     solution or {"solution.py": b""}, not solution)
            if not report.get("unsupported"):
                break
        tests = report["tests"]
        expected = tuple((name, outcome) for name, outcome in tests.items() if outcome != "skipped")
        if report["timeout"]:
            fault = f"it takes more than {self.timeout_s:g} s"
        elif report["error"] or report["killed"] or set(tests.values()) - {"passed", "skipped", "xfailed"}:
            fault = report["error"] or report["message"] or "it was killed"
        elif not expected:
            fault = "no test ran"
        else:
            return Plan(runner, tuple(report["names"]) if solution else None, report["trust"] if solution else None,
                        expected)
        return Plan(runner, fault=f"task {task.id}: the reference does not pass: {fault}")

    def _attempt(self, task, plan: Plan, files: dict[str, bytes]) -> Verdict:
        report, output, seconds = self._run(task, plan, files, collect=False)
        results, tests = report["tests"], {}
        for name, wanted in plan.expected:
            got = results.get(name, "missing")
            tests[name] = "passed" if got == wanted else got if got in ("missing", "error") else "failed"
        passed = list(tests.values()).count("passed")
        extra = [name for name in results if name not in tests and results[name] != "skipped"]
        if report["timeout"]:
            outcome, message = "timeout", f"stopped after {self.timeout_s:g} s"
        elif report["oom"] and passed < len(tests) or report["killed"]:
            outcome, message = "oom", report["error"] or report["message"]
        elif report["error"]:
            outcome, message = "error", report["error"]
        elif passed == len(tests) and not extra:
            outcome, message = "passed", ""
        else:
            outcome = "failed"
            message = report["message"] or f"tests that are not the reference's: {', '.join(extra)}"
        reward = float(outcome == "passed")
        if outcome == "failed" and "score" in report:
            reward = report["score"]
        elif outcome == "failed" and self.reward == "pass_ratio" and not extra:
            reward = passed / len(tests)
        output += "\n" * (output != "" and message != "" and not output.endswith("\n"))
        return Verdict(outcome, reward, passed, len(tests), seconds, readable(output + message), tests,
                       report.get("ending", ""))

    def _run(self, task, plan: Plan, files: dict[str, bytes], collect: bool) -> tuple[dict, str, float]:
        verifier = plan.runner == "verifier"
        job = make_job(files, test_files(task), plan.runner, plan.names, plan.trust, collect,
                       stub_sources() if verifier else None)
        report, output, seconds = self.pool.run(job)
        return scored(report) if verifier else report, output, seconds


def gradable(task) -> bool:
    return TEST in task.files or any(map(is_test_file, test_files(task)))


def test_files(task) -> dict[str, bytes]:
    return {name[6:]: data for name, data in task.files.items() if name.startswith("tests/")}


def reference(task) -> dict[str, bytes]:
    """The reference solution as files of /app; empty if there is none."""
    files = {name[9:]: data for name, data in task.files.items() if name.startswith("solution/")}
    modules = [name for name in files if name.endswith(".py")]
    if "solution.py" in modules:
        return files
    return {"solution.py": files[modules[0]]} if len(modules) == 1 else {}


def solution_files(task_id: str, files: dict[str, str | bytes]) -> dict[str, bytes]:
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
            raise ValueError(f"task {task_id}: {name!r} is no path below /app")
    return {name: data.encode(errors="surrogatepass") if isinstance(data, str) else data
            for name, data in files.items()}


def read_tests(tests: Path) -> SimpleNamespace:
    """A task without a reference: the tests it expects are those that the files define."""
    if not tests.exists():
        raise ValueError(f"{tests}: no such file or directory")
    name = tests.name if is_test_file(tests.name) else f"test_{tests.name}"
    paths = {name: tests} if tests.is_file() else {
        path.relative_to(tests).as_posix(): path for path in sorted(tests.rglob("*")) if path.is_file()}
    files = {f"tests/{name}": path.read_bytes() for name, path in paths.items()}
    return SimpleNamespace(id=str(tests), files=files)


def main() -> int:
    summary, *_, examples = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=f"examples:\n{examples}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print the isolation that this machine allows")
    parser.add_argument("--solution", type=Path, help="a Python file, imported as `solution`")
    parser.add_argument("--tests", type=Path, help="a test file or a directory of tests")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds (default 10)")
    parser.add_argument("--memory-mb", type=int, default=512, metavar="M", help="MB (default 512)")
    parser.add_argument("--isolation", choices=("auto", *LEVELS), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    if not args.check and not (args.solution and args.tests):
        parser.error("give --solution and --tests, or --check")
    try:
        if not args.check:
            task, code = read_tests(args.tests), args.solution.read_bytes()
        with Sandbox(1, args.timeout, args.memory_mb, args.isolation) as sandbox:
            if args.check:
                print(f"{sandbox.level}: {LEVELS[sandbox.level]}; Landlock ABI {landlock_abi()}")
                for what, done in sandbox.found.items():
                    print(f"{'CAN' if done else 'cannot'} {what}")
                return 0
            verdict = sandbox.grade(task, {"solution.py": code})
    except (ValueError, OSError, RuntimeError) as exc:
        print(f"sandbox.py: {exc}", file=sys.stderr)
        return 3 if isinstance(exc, RuntimeError) else 2
    if args.json:
        print(json.dumps({name: value for name, value in asdict(verdict).items()
                          if name not in ("tests", "ending")}))
    else:
        print(f"{verdict.outcome}: {verdict.passed} of {verdict.total} tests in {verdict.seconds:.2f} s",
              verdict.output, sep="\n")
    return 3 if verdict.outcome == "infra" else 0


if __name__ == "__main__":
    sys.exit(main())
