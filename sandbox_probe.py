"""Which isolation this machine allows. A solution of our own looks around from inside: at a file, a port, an abstract
socket and a process outside, and at its own privileges. The first rung of the ladder on which it reaches none of them
is the level of the sandbox. `python sandbox.py --check` prints the result; not launched by hand.
"""
import json
import os
import socket
import subprocess
import tempfile
import uuid

from sandbox_pool import SETUP_S, Infra, Worker, make_job

LEVELS = {
    "network": "namespaces for users, mounts, processes and network; seccomp",
    "mounts": "namespaces for users, mounts and processes; seccomp denies the network",
    "landlock": "no namespaces: Landlock and seccomp",
    "none": "none: two processes with resource limits",
}
PROBE = '''
import ctypes, json, os, signal, socket

def opens(path, mode):
    try:
        open(path, mode).close()
        return True
    except OSError:
        return False

def connects(family, address):
    try:
        with socket.socket(family) as sock:
            sock.settimeout(2)
            sock.connect(address)
        return True
    except OSError:
        return False

def kills(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except OSError:
        return False

def privileged(libc):
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    no_new_privs = libc.prctl(39, 0, 0, 0, 0) == 1
    return not no_new_privs or libc.capget(header, sets) != 0 or any(sets)

def look(secret, beside, port, name, pid):
    import wave  # a module that no zygote has loaded: the interpreter must be in reach
    libc = ctypes.CDLL(None)
    print(json.dumps({
        "read a file outside": opens(secret, "rb"),
        "write a file outside": opens(beside, "wb"),
        "reach a port of the host": connects(socket.AF_INET, ("127.0.0.1", port)),
        "reach an abstract socket of the host": connects(socket.AF_UNIX, "\\0" + name),
        "kill a process outside": kills(pid),
        "make a user namespace": libc.unshare(0x10000000) == 0,
        "gain capabilities": privileged(libc),
    }))
'''


def look_around(worker: Worker) -> dict[str, bool]:
    """What a solution in a fresh worker tried, and whether it succeeded. Infra: it did not come so far."""
    with (tempfile.TemporaryDirectory(prefix="sandbox-outside-") as folder,
          socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract):
        os.chmod(folder, 0o777)  # any user may write here: only walls can keep a solution out
        secret, beside, name = os.path.join(folder, "secret"), os.path.join(folder, "beside"), f"sandbox-{uuid.uuid4()}"
        with open(secret, "w") as file:
            file.write("outside")
        os.chmod(secret, 0o666)
        abstract.bind("\0" + name)
        abstract.listen()
        bystander = subprocess.Popen(["sleep", str(2 * SETUP_S)], stdin=subprocess.DEVNULL)
        try:
            arguments = (secret, beside, tcp.getsockname()[1], name, bystander.pid)
            tests = f"from solution import look\ndef test_walls():\n    look{arguments!r}\n"
            report, output, _ = worker.run(make_job({"solution.py": PROBE.encode()}, {"test_probe.py": tests.encode()}),
                                           SETUP_S)
            if report["error"] or report.get("message") or report["timeout"]:
                raise Infra(report["error"] or report.get("message") or f"no answer within {SETUP_S:.0f} s")
            found = json.loads(output)
            found["write a file outside"] |= os.path.exists(beside)
            found["kill a process outside"] |= bystander.poll() is not None
            return found
        finally:
            bystander.kill()
            bystander.wait()


def climb(isolation: str, settings: dict) -> tuple[Worker, str, dict[str, bool]]:
    """The first rung that holds: a worker, the level, and what its solution tried. isolation: "auto", or one level that
    it must be. RuntimeError when no rung holds."""
    reasons = []
    for level in ("network", "mounts", "landlock") if isolation == "auto" else (isolation,):
        worker = Worker(settings | {"level": level})
        try:
            worker.start()
            found = look_around(worker)
            broken = [what for what, done in found.items() if done]
            if not broken or level == "none":
                return worker, level, found
            reason = f"a solution could {', '.join(broken)}"
        except (Infra, OSError) as exc:
            reason = str(exc)
        worker.close()
        reasons.append(f"{level}: {reason}")
    raise RuntimeError(f"this machine does not let code be isolated ({'; '.join(reasons)}); "
                       '"isolation": "none" runs it with resource limits only')
