"""Tasks that cannot teach: found by running them, written down with the reason, left out of training.

A task is good when, in the sandbox, its reference passes three times of three and a solution that does nothing
fails: an empty file, functions that return None, that return their first argument, that raise ValueError. Anything
else makes its reward noise or a gift. The reasons are kept as one JSON object, {task id: reason}:

    python tasks.py verify tasks.parquet --workers 4 --quarantine quarantine.json
    accelerate launch train.py --config FILE data.train=tasks.parquet data.quarantine=quarantine.json

Leaves out: whether the instruction says what the tests ask for, tests that a cleverer wrong solution passes, and
flakiness rarer than one run in three. A task is known by its id alone: verify again after a change.
"""

import ast
import json
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from archives import Task
from sandbox import Sandbox, Verdict, reference, test_files
from sandbox_runner import is_test_file

REPEATS = 3
LAZY = '''\
__all__ = {names!r}
def lazy(*args, **kwargs):
    {body}
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lazy
'''
BODIES = {
    "functions that return None": "return None",
    "functions that return their argument": "return [*args, *kwargs.values(), None][0]",
    "functions that raise": "raise ValueError",
}
# Shows whether the machine grades at all. No task of a set has an empty id.
CONTROL = Task("", "", {"tests/test_one.py": b"from solution import one\ndef test_one():\n    assert one() == 1\n",
                        "solution/solution.py": b"def one():\n    return 1\n"})


def parse_fault(task: Task) -> str:
    """The first test file or conftest.py that is no Python, with the reason; "" if all of them parse."""
    for name, source in sorted(test_files(task).items()):
        if is_test_file(name) or name.rpartition("/")[2] == "conftest.py":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of escapes and the like in other people's tests
                    ast.parse(source, name)
            except (SyntaxError, ValueError, RecursionError) as error:  # ValueError: null bytes, before 3.11.4
                return f"its tests do not parse: tests/{name}: {error}"
    return ""


def verify(task: Task, sandbox: Sandbox) -> str:
    """Why a task is not to be trained on, in one line; "" for a good task. RuntimeError: the machine cannot grade."""
    solution = reference(task)
    if not solution:
        return "no reference solution"
    try:
        for run in range(1, REPEATS + 1):
            verdict = _grade(task, solution, sandbox)
            if verdict.outcome != "passed":
                return _one_line(f"the reference passes, and in repeat {run} of {REPEATS} it does not: "
                                 f"{verdict.outcome}: {verdict.output}")
        if _grade(task, {"solution.py": ""}, sandbox).outcome == "passed":
            return "an empty solution passes"
        for title, body in BODIES.items():
            code = LAZY.format(names=list(sandbox.plans[task.id].names), body=body)
            if _grade(task, {"solution.py": code}, sandbox).outcome == "passed":
                return f"a solution passes that has but {title}"
    except ValueError as error:  # no tests, or a reference that leaves /app
        return _one_line(str(error).removeprefix(f"task {task.id}: "))
    return ""


def verify_all(tasks: list[Task], sandbox: Sandbox, workers: int) -> dict[str, str]:
    """{task id: reason} of the tasks that are not good, `workers` at once."""
    faults = {task.id: fault for task in tasks if (fault := parse_fault(task))}
    rest = [task for task in tasks if task.id not in faults]
    with (ThreadPoolExecutor(workers) as pool,
          tqdm(total=len(tasks), initial=len(faults), desc="verify", unit="task") as bar):
        for task, reason in zip(rest, pool.map(lambda task: verify(task, sandbox), rest)):
            if reason:
                faults[task.id] = reason
            bar.set_postfix(bad=len(faults), refresh=False)
            bar.update()
    return faults


def write(faults: dict[str, str], path: str) -> None:
    """The whole file or, on an error, the one that was there before."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(faults, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def leave_out(tasks: list[Task], path: str | None, report: Callable[[str], object] = lambda line: None) -> list[Task]:
    """The tasks that the file does not name; all of them when there is no file (None). `report` hears how many went.

    ValueError: the file cannot be read or is no object of reasons, or names every task.
    """
    if path is None:
        return tasks
    try:
        faults = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"data.quarantine: {path}: cannot be read: {error}") from None
    if type(faults) is not dict or any(type(reason) is not str for reason in faults.values()):
        raise ValueError(f'data.quarantine: {path}: expected an object {{"task id": "reason"}}')
    good = [task for task in tasks if task.id not in faults]
    if not good:
        raise ValueError(f"data.quarantine: {path}: names every one of {len(tasks)} tasks")
    if len(good) < len(tasks):
        report(f"{len(tasks) - len(good)} of {len(tasks)} tasks are left out, as {path} says")
    return good


def _grade(task: Task, files: dict[str, str | bytes], sandbox: Sandbox) -> Verdict:
    """ValueError: this task gets no verdict, though the machine grades. RuntimeError: it grades nothing."""
    verdict = sandbox.grade(task, files)
    if verdict.outcome == "infra":
        control = sandbox.grade(CONTROL, reference(CONTROL))
        if control.outcome != "passed":
            raise RuntimeError(f"task {task.id}: no verdict, nor on any task: {_one_line(control.output)}")
        raise ValueError(verdict.output)
    return verdict


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
