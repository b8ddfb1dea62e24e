"""Harbor verifiers: a task whose only test is tests/test.sh, a script that writes its reward into /logs/verifier.

The script runs in the judge's namespace, where the solution is not: /app/solution.py is a stub there, and each
interpreter that meets it (sandbox_stub.py) asks for a solution process of its own. The judge makes a pair of
sockets and hands one end to each side, so all that crosses is what the wire lets through.

  judge       run_verifier: test.sh and what it starts    stub -> "import" or "script", one end of the pair
  solution    serve: one fork a request, the other end    solution_process, or `python solution.py`
  supervisor  scored: reward.txt, else reward.json        missing, empty, no number and out of range are told apart

Nothing can be installed: pip and apt-get say so at once and the script goes on; what is there counts as installed.
Leaves out: files of the solution but solution.py, its text (the script sees the stub's), interactive stdin, one
import shared by forked processes, `python -m pip install` and other ways to a network (they fail at once).
"""
import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from sandbox_wire import Wire, write_files

TEST = "tests/test.sh"
REWARDS = "/logs/verifier"
HELPERS = "/dev/shm/stub"  # in no folder that a script is likely to look at
SOCKET, NAMES = f"{HELPERS}/socket", f"{HELPERS}/names.json"
MAX_REWARD = 1 << 16  # bytes
STUB = f'''\
"""Stands for the solution, which runs in a process of its own."""
__import__("sys").path.append("{HELPERS}")
if __name__ == "__main__":
    __import__("sandbox_stub").run_as_script()
__getattr__ = __import__("sandbox_stub").import_solution()
'''
REFUSE = '#!/bin/sh\necho "$(basename "$0"): no network in the sandbox, nothing is installed" >&2\n'
PIP = f'''\
#!/bin/sh
"{sys.executable}" -m pip "$@" && exit
status=$?
[ "$1" = install ] || exit $status
echo "pip: no network in the sandbox, nothing is installed" >&2
'''


# ---- supervisor ----

def stub_sources() -> dict[str, bytes]:
    """What the interpreters of test.sh need of this project."""
    return {path.name: path.read_bytes() for path in Path(__file__).parent.glob("sandbox_*.py")}


def scored(report: dict) -> dict:
    """A judge's report with the one test of a verifier, its score in 0 to 1 and, without one, why."""
    if "rewards" not in report:  # no report came in time, or it says already what went wrong
        return report
    score, ending, error = read_reward(report["rewards"])
    message = "" if score == 1 else f"{TEST} gave {score}"
    return report | {"tests": {TEST: "passed" if score == 1 else "failed"}, "score": score, "ending": ending,
                     "error": error, "message": message}


def read_reward(files: dict[str, str | None]) -> tuple[float | None, str, str]:
    """(score, "", "") or (None, the name that Harbor gives the failure, what was found). None: no such file."""
    name = "reward.json" if files["reward.txt"] is None else "reward.txt"
    text = files[name]
    if text is None:
        return None, "RewardFileNotFoundError", f"{TEST} wrote neither reward.txt nor reward.json"
    if not text.strip():
        return None, "RewardFileEmptyError", f"{name} is empty"
    try:
        value = float(text) if name == "reward.txt" else json.loads(text)
        value = value["reward"] if type(value) is dict else value
        if type(value) not in (int, float):
            raise ValueError
    except (ValueError, KeyError, RecursionError):
        return None, "VerifierOutputParseError", f"{name} holds no reward: {text[:100]!r}"
    if not 0 <= value <= 1:
        return None, "VerifierOutputParseError", f"{name} holds {text.strip()[:100]}, which is out of range 0 to 1"
    return float(value), "", ""


# ---- judge ----

def run_verifier(wire: Wire, job: dict, folder: str) -> dict:
    """Run test.sh to its end -> what the report holds: "rewards", file name -> text, and the "names" that a star
    import of the solution could bring."""
    files, tests, helpers = ({name: base64.b64decode(data) for name, data in job[part].items()}
                             for part in ("files", "tests", "helpers"))
    write_files(folder, tests)
    write_files("/app", {"solution.py": STUB.encode()})
    write_files(HELPERS, helpers | {"names.json": json.dumps(job["names"]).encode(), "bin/pip": PIP.encode(),
                                    "bin/pip3": PIP.encode(), "bin/apt-get": REFUSE.encode(),
                                    "bin/apt": REFUSE.encode(), "bin/apk": REFUSE.encode()})
    for name in os.listdir(f"{HELPERS}/bin"):
        os.chmod(f"{HELPERS}/bin/{name}", 0o755)
    for name in tests:
        if name.endswith(".sh"):  # archives keep no modes
            os.chmod(f"{folder}/{name}", 0o755)
    os.makedirs(REWARDS)
    wire.send({"serve": True}, files)
    environment = {"PATH": f"{HELPERS}/bin:{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
                   "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                   "MALLOC_ARENA_MAX": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    found: set[str] = set()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen(64)
        threading.Thread(target=answer, args=(listener, wire.sock, found), daemon=True).start()
        try:
            subprocess.run(["bash", f"{folder}/test.sh"], cwd="/app", stdin=subprocess.DEVNULL, env=environment,
                           check=False)
        except OSError as exc:
            return {"error": f"{TEST} cannot be run: {exc}"}
    return {"names": sorted(found), "rewards": {name: read(name) for name in ("reward.txt", "reward.json")}}


def read(name: str) -> str | None:
    try:
        with open(f"{REWARDS}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(MAX_REWARD)
    except FileNotFoundError:
        return None


def answer(listener: socket.socket, solution: socket.socket, found: set[str]) -> None:
    """Give each interpreter that asks one end of a new pair, and the solution's process the other."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            request = stream.read()
            if request.startswith(b"["):  # after an import: the names it brought
                found.update(json.loads(request))
                continue
            ours, theirs = socket.socketpair()
            with ours, theirs:
                try:
                    socket.send_fds(solution, [request[:1]], [theirs.fileno()])
                    socket.send_fds(connection, [b"y"], [ours.fileno()])
                except OSError:  # the solution's process was killed, or the interpreter: who asked sees the end
                    continue


# ---- solution process ----

def serve(link: socket.socket, folder: str, solution_process: Callable) -> None:
    """One fork a request, none of which has seen a byte of the solution before."""
    while True:
        kind, fds, _, _ = socket.recv_fds(link, 1, 1)
        if not kind:  # the judge is gone
            os._exit(0)
        if os.fork() == 0:
            link.close()
            (solution_process if kind == b"i" else script_process)(socket.socket(fileno=fds[0]), folder)
            os._exit(0)
        os.close(fds[0])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def script_process(link: socket.socket, folder: str) -> None:
    """Run solution.py once with the arguments and the input of the stub; send back what it printed."""
    wire = Wire(link, parity=1)
    request, data = wire.recv()
    done = subprocess.run([sys.executable, "solution.py", *request["arguments"]], cwd=folder, input=data,
                          capture_output=True, check=False)
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode  # as a shell says it
    wire.send({"status": status}, (done.stdout, done.stderr))
