"""The supervisor's end of the sandbox's processes: zygotes, workers (one for solutions, one for judges), and the
pool that hands the workers out. sandbox.py decides on what they report; not launched by hand.
"""
import base64
import json
import os
import queue
import select
import socket
import subprocess
import sys
import tempfile
import time

import sandbox_inside
from sandbox_wire import send_frame

SETUP_S = 30.0  # for what happens before the first untrusted byte; beyond it the machine is at fault
END_S = 15.0
OUTPUT_BYTES = 4096
RUNS = 500  # of one worker, then a fresh one takes its place, as it does when
MORE_DESCRIPTORS, MORE_BYTES = 16, 64 << 20  # a zygote has that many more than after its first run
JUDGE_MB = 1024  # beside memory_mb: the judge holds the largest values that a solution may send


class Infra(Exception):
    """The machine or the sandbox failed, not the solution."""


class Zygote:
    """One warm interpreter that forks a process per run; sandbox_inside.py is its other end."""

    def __init__(self, settings: dict):
        self.usage: list[tuple[int, int]] = []  # descriptors and private bytes after its first and its last run
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
                       "TMPDIR": tempfile.gettempdir(),  # where runs without a mount namespace put their files
                       # threads count as processes, and their arenas as memory
                       "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        if "LD_LIBRARY_PATH" in os.environ:  # the interpreter itself may need it
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", sandbox_inside.__file__, str(theirs.fileno()),
                 json.dumps(settings)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                env=environment, pass_fds=[theirs.fileno()],
                start_new_session=True)  # a Ctrl-C is the trainer's to handle

    def expect(self, answer: bytes, seconds: float) -> bytes:
        """The next message, which must begin with `answer`."""
        self.control.settimeout(seconds)
        try:
            message = self.control.recv(2000)
        except OSError as exc:
            raise Infra(f"no word from a sandbox worker: {exc}") from None
        if not message.startswith(answer):
            raise Infra(message.decode(errors="replace") or "a sandbox worker died")
        return message

    def ended(self) -> bool:
        """Wait for the end of the run -> whether its first process had been killed."""
        killed, descriptors, memory = map(int, self.expect(b"ended", END_S).split()[1:])
        self.usage[1:] = [(descriptors, memory)]
        return bool(killed)

    def leaks(self) -> bool:
        (descriptors, memory), (descriptors_now, memory_now) = self.usage[0], self.usage[-1]
        return descriptors_now - descriptors > MORE_DESCRIPTORS or memory_now - memory > MORE_BYTES

    def close(self) -> None:
        self.control.close()  # on which it ends its run and itself
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Worker:
    """A zygote for solutions and one for judges; one run at a time."""

    def __init__(self, settings: dict):
        self.runs = 0
        self.solution = Zygote(settings | {"role": "solution"})
        try:
            self.judge = Zygote(settings | {"role": "judge", "memory_mb": settings["memory_mb"] + JUDGE_MB})
        except OSError:
            self.solution.close()
            raise

    def start(self) -> None:
        self.solution.expect(b"up", SETUP_S)
        self.judge.expect(b"up", SETUP_S)

    def worn(self) -> bool:
        return self.runs >= RUNS or self.solution.leaks() or self.judge.leaks()

    def close(self) -> None:
        self.solution.close()
        self.judge.close()

    def run(self, job: bytes, timeout_s: float) -> tuple[dict, str, float]:
        """One run: the judge's report with "timeout" and "killed" added, the tail of the output, seconds."""
        job_socket, judge_end = socket.socketpair()
        wire, wire_end = socket.socketpair()
        output, output_end = os.pipe()
        tail, report = bytearray(), {}
        with job_socket, open(output, "rb", buffering=0) as pipe:
            with judge_end, wire, wire_end, open(output_end, "wb", buffering=0):
                socket.send_fds(self.solution.control, [b"run"], [output_end, wire.fileno()])
                socket.send_fds(self.judge.control, [b"run"],
                                [output_end, wire_end.fileno(), judge_end.fileno()])
            try:
                report, seconds = await_report(job_socket, pipe, tail, job, timeout_s)
            finally:
                # "gone" asks how the solution died before anything is killed
                self.solution.control.send(b"end gone" if report.get("gone") else b"end")
                self.judge.control.send(b"end")
                killed = self.solution.ended()
                self.judge.ended()
            while chunk := pipe.read(1 << 16):  # ends, since all writers are dead
                tail += chunk
                del tail[:-2 * OUTPUT_BYTES]
        self.runs += 1
        return report | {"killed": killed and not report["timeout"]}, tail.decode(errors="replace"), seconds


def await_report(job_socket: socket.socket, pipe, tail: bytearray, job: bytes,
                 timeout_s: float) -> tuple[dict, float]:
    """Hand out the job when both processes stand, then drain the output until the report or the deadline."""
    data, started, deadline = bytearray(), 0.0, time.monotonic() + SETUP_S
    job_socket.settimeout(SETUP_S)
    poll = select.poll()
    poll.register(job_socket, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000 + 1):
            if fd == pipe.fileno():
                chunk = pipe.read(1 << 16)
                tail += chunk
                del tail[:-2 * OUTPUT_BYTES]
                if not chunk:
                    poll.unregister(pipe)
                continue
            chunk = job_socket.recv(1 << 16)
            if not chunk:
                raise Infra("the judge ended without a report")
            data += chunk
            if len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
                continue
            try:
                message = json.loads(data[4:])
            except ValueError as exc:
                raise Infra(f"the judge's report cannot be read: {exc}") from None
            data.clear()
            if started:
                return message | {"timeout": False}, time.monotonic() - started
            if "setup" in message:
                raise Infra(message["setup"])
            send_frame(job_socket, job)
            started = time.monotonic()
            deadline = started + timeout_s
    if not started:
        raise Infra(f"set-up took more than {SETUP_S:.0f} s")
    return {"timeout": True, "error": "", "tests": {}, "oom": False}, time.monotonic() - started


class Pool:
    """Hands out at most `workers` workers, one run each at a time; None stands for one to start when needed."""

    def __init__(self, settings: dict, workers: int, timeout_s: float, retries: int, first: Worker):
        self.settings, self.workers, self.timeout_s, self.retries = settings, workers, timeout_s, retries
        self.closed = False
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for worker in [None] * (workers - 1) + [first]:
            self.idle.put(worker)

    def run(self, job: bytes) -> tuple[dict, str, float]:
        """One run (see Worker.run), repeated on a fresh worker while the machine fails. Infra after the last try,
        RuntimeError once the pool is closed."""
        failures = 0
        while True:
            worker = self.idle.get()
            try:
                if self.closed:
                    raise RuntimeError("the sandbox is closed")
                if worker is None:
                    worker = Worker(self.settings)
                    worker.start()
                result = worker.run(job, self.timeout_s)
                if result[0]["killed"] and not memory_left():
                    raise Infra("a solution was killed while the host was out of memory")
                if worker.worn():
                    worker.close()
                    worker = None
                return result
            except (Infra, OSError) as exc:
                if worker:
                    worker.close()
                worker = None
                failures += 1
                if failures > self.retries:
                    raise Infra(str(exc)) from None
            finally:
                self.idle.put(worker)

    def close(self) -> None:
        """Wait for the runs under way, then end every process."""
        if self.closed:
            return
        self.closed = True
        for worker in [self.idle.get() for _ in range(self.workers)]:
            if worker:
                worker.close()
        self.idle.put(None)


def make_job(files: dict[str, bytes], tests: dict[str, bytes], runner: str = "own",
             names: tuple[str, ...] | None = None, trust: dict | str | None = None, collect: bool = False,
             helpers: dict[str, bytes] | None = None) -> bytes:
    """What a run is told: the files of /app and of /tests, which runner, what `from solution import *` brings,
    where objects of the solution are believed, whether to list the tests only, and what a verifier needs of this
    project."""
    files, tests, helpers = ({name: base64.b64encode(data).decode() for name, data in (part or {}).items()}
                             for part in (files, tests, helpers))
    return json.dumps({"files": files, "tests": tests, "helpers": helpers, "runner": runner, "names": names,
                       "trust": trust, "collect": collect}).encode()


def memory_left() -> bool:
    """Whether the host itself has memory to spare (64 MB)."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) > 64 << 10
