"""sandbox_pool.py: workers are replaced in time, and what breaks on our side is never the solution's failure."""
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import sandbox
import sandbox_inside
import sandbox_pool

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return None\n"
TESTS = b"from solution import add\ndef test_one():\n    assert add(2, 3) == 5\n"
TASK = SimpleNamespace(id="t", files={"tests/test_a.py": TESTS, "solution/solution.py": ADD.encode()})


def grade(box, code: str = ADD) -> sandbox.Verdict:
    return box.grade(TASK, {"solution.py": code})


@contextmanager
def idle_worker(box):
    worker = box.pool.idle.get()
    yield worker
    box.pool.idle.put(worker)


def children() -> set[str]:
    return {pid for thread in os.listdir("/proc/self/task")
            for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()}


# ---- workers are replaced ----

def test_a_worker_is_replaced_after_its_last_run(monkeypatch):
    monkeypatch.setattr(sandbox_pool, "RUNS", 4)
    before = children()
    with sandbox.Sandbox(1, timeout_s=5) as box:
        seen = []
        for _ in range(9):
            assert grade(box).outcome == "passed"
            with idle_worker(box) as worker:
                seen.append(worker and worker.runs)
        # the probe was the first run of the first worker, the plan its second
        assert seen == [3, None, 1, 2, 3, None, 1, 2, 3]
    assert children() == before


def test_without_a_leak_a_worker_stays():
    with sandbox.Sandbox(1, timeout_s=5) as box:
        for _ in range(30):
            assert grade(box).outcome == "passed"
        with idle_worker(box) as worker:
            assert worker.runs == 32
            for zygote in (worker.solution, worker.judge):
                (descriptors, memory), (descriptors_now, memory_now) = zygote.usage
                assert descriptors_now == descriptors and 0 < memory_now < memory + (4 << 20)


class Leaking:
    """A zygote's socket whose "end" brings three descriptors that the zygote does not expect."""

    def __init__(self, real: socket.socket):
        self.settimeout, self.recv, self.close, self.real = real.settimeout, real.recv, real.close, real
        self.fileno, self.sendmsg = real.fileno, real.sendmsg

    def send(self, message: bytes) -> None:
        socket.send_fds(self.real, [message], [2, 2, 2])


@pytest.mark.parametrize("role", ["solution", "judge"])
def test_a_worker_that_leaks_descriptors_is_replaced(role):
    with sandbox.Sandbox(1, timeout_s=5) as box:
        with idle_worker(box) as first:
            zygote = {"solution": first.solution, "judge": first.judge}[role]
            zygote.control = Leaking(zygote.control)
        for _ in range(8):
            assert grade(box).outcome == "passed"
            with idle_worker(box) as worker:
                if worker is not first:
                    break
        (before, _), (after, _) = zygote.usage
        assert worker is None and after == before + 18 and first.runs == 7
        assert zygote.process.returncode is not None
        assert grade(box).outcome == "passed"


def test_a_worker_that_grows_is_replaced(monkeypatch):
    with sandbox.Sandbox(1, timeout_s=5) as box:
        assert grade(box).outcome == "passed"
        with idle_worker(box) as first:
            descriptors, memory = first.judge.usage[0]
            first.judge.usage[0] = (descriptors, memory - sandbox_pool.MORE_BYTES - (8 << 20))
        assert grade(box).outcome == "passed"
        with idle_worker(box) as worker:
            assert worker is None and first.judge.process.returncode is not None
        assert grade(box).outcome == "passed"


# ---- our faults are infra ----

def test_without_descriptors_it_is_infra_and_passes_by():
    script = """
import os, resource, sandbox
from test_pool import ADD, WRONG, grade, children, idle_worker
low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
with sandbox.Sandbox(1, timeout_s=5) as box:
    assert grade(box).outcome == "passed"
    opened = len(os.listdir("/proc/self/fd")) - 1
    for spare in range(0, 12):  # the table fills up at another step each time
        top = os.dup(2)
        os.close(top)
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + spare, high))
        verdicts = [grade(box, code) for code in (ADD, WRONG)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))
        print(spare, *(verdict.outcome for verdict in verdicts), verdicts[0].output)
        assert [grade(box, code).outcome for code in (ADD, WRONG)] == ["passed", "failed"]
        assert len(os.listdir("/proc/self/fd")) - 1 == opened and len(children()) == 2, (spare, children())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert {tuple(line[1:3]) for line in lines} == {("infra", "infra"), ("passed", "failed")}, done.stdout
    assert all("Too many open files" in line[3] for line in lines if line[1] == "infra"), done.stdout


BROKEN_JUDGES = {
    "does not start": ("raise RuntimeError('broken')\n", "broken"),
    "ends before its first word": ("def judge_process(*_):\n    raise RuntimeError\n", "ended without a report"),
    "crashes in the tests": ("def run_tests(*_):\n    raise RuntimeError\n", "ended without a report"),
    "is killed in the tests": ("def run_tests(*_):\n    os.kill(os.getpid(), 11)\n    os._exit(1)\n",
                               "ended without a report"),
    "reports nonsense": ("def run_tests(*_):\n    os.write(4, b'\\3\\0\\0\\0{]}')\n    os._exit(0)\n",
                         "cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN_JUDGES)
def test_a_broken_judge_is_infra_after_retries_on_fresh_workers(name, tmp_path, monkeypatch):
    code, message = BROKEN_JUDGES[name]
    for path in Path(sandbox.__file__).parent.glob("sandbox*.py"):
        shutil.copy(path, tmp_path)
    with open(tmp_path / "sandbox_judge.py", "a") as file:
        file.write(f"\nimport os\n{code}")
    before, started = children(), []

    class Counted(sandbox_pool.Worker):
        def start(self):
            started.append(self)
            super().start()

    with sandbox.Sandbox(1, timeout_s=5, retries=2) as box:
        assert grade(box).outcome == "passed"
        with monkeypatch.context() as patch:
            patch.setattr(sandbox_inside, "__file__", str(tmp_path / "sandbox_inside.py"))
            patch.setattr(sandbox_pool, "Worker", Counted)
            with idle_worker(box) as worker:
                worker.close()
            for solution in (ADD, WRONG):
                started.clear()
                verdict = grade(box, solution)
                assert (verdict.outcome, verdict.reward, verdict.tests) == ("infra", None, {}), verdict
                assert message in verdict.output
                assert len(started) == (2 if solution == ADD else 3)  # the closed worker was the first of three tries
                assert children() == before
        assert [grade(box, solution).outcome for solution in (ADD, WRONG)] == ["passed", "failed"]
