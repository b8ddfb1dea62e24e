"""quarantine.py: what makes a task bad, who is to blame when there is no verdict, and a file that training obeys."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from conftest import MEMORISED

import plan
import quarantine
from archives import Task
from config import load_config
from generator import generate
from sandbox import Sandbox
from tasks import load_tasks, pack

ROOT = Path(__file__).parent.parent
ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "from solution import add\ndef test_add():\n    assert add(2, 3) == 5\n"


def task(id, tests, reference=None):
    files = {"tests/test_solution.py": tests.encode()}
    return Task(id, "Add.", files | ({"solution/solution.py": reference.encode()} if reference else {}))


@pytest.fixture(scope="module")
def box():
    with Sandbox(workers=2, timeout_s=5.0, memory_mb=256) as made:
        yield made


@pytest.mark.parametrize("tests, reference", [
    (ADD_TESTS, ADD),
    ("from solution import *\ndef test_add():\n    assert add(2, 3) == 5\n", ADD),
    ("import solution\ndef test_answer():\n    assert solution.ANSWER == 42\n", "ANSWER = 42\n"),
    ("import pytest\nfrom solution import root\n@pytest.mark.parametrize('x, y', [(4, 2), (9, 3)])\n"
     "def test_root(x, y):\n    assert root(x) == y\n"
     "def test_bad():\n    with pytest.raises(ValueError):\n        root(-1)\n",
     "def root(x):\n    if x < 0:\n        raise ValueError\n    return int(x ** 0.5)\n"),
])
def test_a_good_task_has_no_reason(box, tests, reference):
    assert quarantine.verify(task(f"good {hash(tests)}", tests, reference), box) == ""


@pytest.mark.parametrize("tests, reference, reason", [
    (ADD_TESTS, "add = max\n", "the reference does not pass: tests/test_solution.py::test_add: AssertionError"),
    (ADD_TESTS, None, "no reference solution"),
    ("def test_nothing():\n    assert True\n", ADD, "an empty solution passes"),
    ("from solution import log\ndef test_log():\n    assert log('x') is None\n", "def log(x):\n    pass\n",
     "a solution passes that has but functions that return None"),
    ("from solution import *\ndef test_log():\n    assert log('x') is None\n", "def log(x):\n    pass\n",
     "a solution passes that has but functions that return None"),
    ("from solution import same\ndef test_same():\n    assert same([1]) == [1] and same(x=2) == 2\n",
     "def same(x):\n    return x\n", "a solution passes that has but functions that return their argument"),
    ("import pytest, solution\ndef test_bad():\n    with pytest.raises(ValueError):\n        solution.root(-1)\n",
     "def root(x):\n    raise ValueError(x)\n", "a solution passes that has but functions that raise"),
    ("x = 1\n", ADD, "the reference does not pass: no test ran"),
    ("import os\nfrom solution import add\ndef test_add():\n    os._exit(0)\n", ADD,
     "the judge ended without a report"),
])
def test_a_bad_task_has_its_reason(box, tests, reference, reason):
    assert quarantine.verify(task(f"bad {hash(tests)}", tests, reference), box).startswith(reason)


def test_a_task_without_tests_is_bad(box):
    bare = Task("bare", "Add.", {"tests/data.txt": b"", "solution/solution.py": b"x = 1\n"})
    assert quarantine.verify(bare, box) == "no tests (tests/test_*.py or tests/test.sh)"


class FakeSandbox:
    """Gives the outcomes of a script, one a grade; the control task has its own."""

    def __init__(self, outcomes, control="passed"):
        self.outcomes, self.control = iter(outcomes.split()), control
        self.plans = {"t": SimpleNamespace(names=("add",))}

    def grade(self, task, files):
        outcome = next(self.outcomes) if task.id else self.control
        return SimpleNamespace(outcome=outcome, output=f"why\n{outcome}")


@pytest.mark.parametrize("outcomes, reason", [
    ("passed passed passed error failed timeout oom", ""),
    ("passed passed failed", "the reference passes, and in repeat 3 of 3 it does not: failed: why failed"),
    ("timeout", "the reference passes, and in repeat 1 of 3 it does not: timeout: why timeout"),
    ("passed passed passed passed", "an empty solution passes"),
    ("passed infra", "why infra"),
    ("passed passed passed failed infra", "why infra"),
])
def test_every_repeat_counts(outcomes, reason):
    box = FakeSandbox(outcomes)
    assert quarantine.verify(task("t", ADD_TESTS, ADD), box) == reason
    assert not list(box.outcomes)  # no run more than needed


def test_a_machine_that_grades_nothing_is_not_the_tasks_fault():
    with pytest.raises(RuntimeError, match="^task t: no verdict, nor on any task: why infra$"):
        quarantine.verify_all([task("t", ADD_TESTS, ADD)], FakeSandbox("passed infra", control="infra"), 1)


@pytest.mark.parametrize("files, fault", [
    ({"tests/test_a.py": b"def test_a(:\n"}, "tests/test_a.py: "),
    ({"tests/test_a.py": b"x = 1\n", "tests/sub/conftest.py": b"\nprint 1\n"}, "tests/sub/conftest.py: "),
    ({"tests/test_a.py": b"x = '\0'\n"}, "tests/test_a.py: source code string cannot contain null bytes"),
    ({"tests/test_a.py": "# coding: latin-1\nx = 'é'\n".encode("latin-1")}, ""),
    ({"tests/test_a.py": b"x = '\\d'\n", "tests/data.py": b"no python", "solution/test_b.py": b"(", "a.py": b"("}, ""),
])
def test_tests_that_do_not_parse(files, fault, recwarn):
    found = quarantine.parse_fault(Task("t", "Add.", files))
    assert found.startswith(f"its tests do not parse: {fault}") if fault else found == ""
    assert not recwarn.list


def test_verify_all_keeps_count_and_needs_no_sandbox_for_what_does_not_parse(capsys):
    tasks = [task("broken", "def test_a(:\n", ADD), task("t", ADD_TESTS, ADD)]
    found = quarantine.verify_all(tasks, FakeSandbox("passed passed passed passed"), 1)
    assert found["t"] == "an empty solution passes"
    assert found["broken"].startswith("its tests do not parse: tests/test_solution.py: ")
    assert found["broken"].endswith("(test_solution.py, line 1)")
    assert "2/2" in capsys.readouterr().err


def test_the_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "quarantine.json"
    quarantine.write({"b": "é", "a": "why"}, str(path))
    assert list(json.loads(path.read_text()).items()) == [("a", "why"), ("b", "é")]
    with pytest.raises(TypeError):
        quarantine.write({"a": {1}}, str(path))
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        quarantine.write({"a": "why"}, str(tmp_path / "folder"))
    assert json.loads(path.read_text()) == {"a": "why", "b": "é"}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "quarantine.json"]


def test_leave_out(tmp_path):
    tasks, lines, path = [task(id, ADD_TESTS) for id in "abc"], [], tmp_path / "q.json"
    quarantine.write({"b": "why", "unknown": "why"}, str(path))
    assert [left.id for left in quarantine.leave_out(tasks, str(path), lines.append)] == ["a", "c"]
    assert lines == [f"1 of 3 tasks are left out, as {path} says"]
    assert quarantine.leave_out(tasks, None, lines.append) == tasks and len(lines) == 1
    quarantine.write({}, str(path))
    assert quarantine.leave_out(tasks, str(path), lines.append) == tasks and len(lines) == 1


@pytest.mark.parametrize("content, message", [
    (None, "cannot be read"), ("{", "cannot be read"), ("[]", "expected an object"), ('{"a": 1}', "expected an object"),
    ('{"a": "why"}', "names every one of 1 tasks"),
])
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "q.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"^data.quarantine: {path}: {message}"):
        quarantine.leave_out([task("a", ADD_TESTS)], str(path))


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          check=False)


@pytest.mark.slow
def test_the_command_line(tmp_path):
    good = generate("mixed", "train", 4)
    broken = replace(good[0], id="broken", files=good[0].files | {"tests/test_solution.py": b"def test_0(:\n"})
    vacuous = replace(good[0], id="vacuous", files=good[0].files | {"tests/test_solution.py": b"def test_0(): pass\n"})
    source, out = str(tmp_path / "tasks.parquet"), tmp_path / "q.json"
    pack([*good[:2], vacuous, broken, *good[2:]], source)
    done = run("tasks.py", "verify", source, "--workers", "2", "--quarantine", str(out))
    assert done.returncode == 1 and "6/6" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["broken", "vacuous", "4"]
    assert done.stdout.endswith("\n4 of 6 tasks are good\n")
    assert sorted(json.loads(out.read_text())) == ["broken", "vacuous"]
    done = run("tasks.py", "verify", "generated:chains:heldout:3", "--workers", "1", "--quarantine", str(out))
    assert (done.returncode, done.stdout) == (0, "3 of 3 tasks are good\n")
    assert json.loads(out.read_text()) == {}


@pytest.mark.parametrize("arguments, line", [
    (["--workers", "0"], "--workers is 0, must be 1 or more"),
    (["--quarantine", "nowhere/q.json"], "--quarantine: nowhere: no such directory"),
    (["--timeout", "0"], "needed: workers >= 1, timeout_s > 0"),
])
def test_bad_arguments_are_one_line(arguments, line):
    done = run("tasks.py", "verify", "generated:chains:heldout:3", *arguments)
    assert done.returncode == 2 and done.stderr.startswith(f"tasks.py: {line}") and done.stderr.count("\n") == 1


def half(tmp_path):
    """A file that names every second one of the 16 tasks, and the ids of the others."""
    ids = [memorised.id for memorised in load_tasks(MEMORISED)]
    quarantine.write(dict.fromkeys(ids[::2], "why"), str(tmp_path / "q.json"))
    return f"data.quarantine={tmp_path / 'q.json'}", set(ids[1::2])


def test_the_plan_counts_without_them(tmp_path, capsys):
    override, _ = half(tmp_path)
    config = load_config("configs/laptop.json", [f"data.train={MEMORISED}", "trainer.train_batch_size=4",
                                                 "trainer.policy_mini_batch_size=4", override])
    plan.print_plan(config, as_json=True)
    assert json.loads(capsys.readouterr().out)["batch"]["steps_per_epoch"] == 2


@pytest.mark.slow
def test_training_and_evaluation_never_meet_them(memorising_model, tmp_path):
    override, left = half(tmp_path)
    done = run("train.py", "--config", "configs/laptop.json", f"model.path={memorising_model}", override,
               f"trainer.run_dir={tmp_path / 'run'}", f"data.train={MEMORISED}", f"data.eval={MEMORISED}",
               "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "trainer.max_steps=2",
               "trainer.eval_interval=2", "trainer.eval_samples=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 of 16 tasks are left out") == 2
    shards = sorted((tmp_path / "run" / "traces").glob("*.parquet"))
    assert {name for shard in shards for name in pq.read_table(shard)["task"].to_pylist()} == left
    export = tmp_path / "run" / "exports" / "global_step_2"
    done = run("evaluate.py", "--model", str(export), "--tasks", MEMORISED, "--samples", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"] == 8
    done = run("evaluate.py", "--model", str(export), "--tasks", MEMORISED, "--samples", "1", "data.quarantine=nowhere")
    assert done.returncode == 2 and done.stderr.startswith("evaluate.py: data.quarantine: nowhere: cannot be read")
