"""sandbox_pool.py: workers are replaced in time, and what breaks on our side is never the solution's failure."""
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_sandbox import ADD, ADD_TESTS, CHEATS, CORRECT, WRONG, descendants, task

import sandbox
import sandbox_inside
import sandbox_pool

TESTS = b"from solution import add\ndef test_one():\n    assert add(2, 3) == 5\n"
TASK = SimpleNamespace(id="t", files={"tests/test_a.py": TESTS, "solution/solution.py": ADD.encode()})


def grade(box, code: str = ADD) -> sandbox.Verdict:
    return box.grade(TASK, {"solution.py": code})


@contextmanager
def idle_worker(box):
    worker = box.pool.idle.get()
    try:
        yield worker
    finally:
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


# ---- all at once ----

HOSTILE = CHEATS | {
    "hang": "def add(a, b):\n    while True: pass\n",
    "hoard": "def add(a, b): return len(bytearray(1 << 30))\n",
    "files and a daemon": "import os, time\nfor p in ('/app/x', '/tmp/x', '/dev/shm/x'):\n"
        "    try: open(p, 'w').write('x' * 9999)\n    except OSError: pass\n"
        "try:\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(60)\nexcept OSError: pass\n" + WRONG,
}


def held(workers: list) -> dict:
    """What this process and the zygotes hold: descendants, descriptors, mounts."""
    pids = [zygote.process.pid for worker in workers for zygote in (worker.solution, worker.judge)]
    return {"processes": descendants(), "descriptors": sorted(os.listdir("/proc/self/fd")),
            "zygotes' descriptors": [zygote.usage[-1][0] for w in workers for zygote in (w.solution, w.judge)],
            "mounts": [Path(f"/proc/{pid}/mountinfo").read_text() for pid in ("self", *pids)]}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def files_of_runs(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # on the rung without mounts, runs of another user put their files here
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


@pytest.mark.slow
def test_two_hundred_runs_leave_nothing(files_of_runs):
    honest = [(True, name, code + ADD) for name, code in CORRECT.items()]
    hostile = [(False, name, code) for name, code in HOSTILE.items()]
    samples = (honest * 10)[:100] + (hostile * 3)[:100]
    random.Random(0).shuffle(samples)
    adds = task("adds", ADD_TESTS, ADD)
    with sandbox.Sandbox(2, timeout_s=2.0, memory_mb=256) as box, ThreadPoolExecutor(2) as pool:
        def one(sample: tuple) -> tuple:
            right, name, code = sample
            verdict = box.grade(adds, {"solution.py": code})
            return right, name, verdict.outcome, verdict.reward

        list(pool.map(one, [(True, "warm", ADD)] * 10))
        workers = list(box.pool.idle.queue)
        before, memory = held(workers), resident()
        results = list(pool.map(one, samples))
        assert [found for found in results if found[0] and found[2:] != ("passed", 1.0)] == []
        assert [found for found in results if not found[0] and
                (found[2] not in ("failed", "error", "timeout", "oom") or found[3] != 0.0)] == []
        assert {found[2] for found in results} == {"passed", "failed", "error", "timeout", "oom"}
        assert sorted(map(id, box.pool.idle.queue)) == sorted(map(id, workers))
        assert held(workers) == before and os.listdir(files_of_runs) == []
        assert sum(worker.runs for worker in workers) == 212  # with the probe, the plan and the first ten
        for zygote in (zygote for worker in workers for zygote in (worker.solution, worker.judge)):
            assert zygote.usage[-1][1] - zygote.usage[0][1] < 4 << 20
        assert resident() - memory < 16 << 20
