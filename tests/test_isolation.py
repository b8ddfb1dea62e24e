"""The two filters, and the rungs below the best: which one is chosen where something is missing, and that it holds."""
import ctypes
import json
import os
import subprocess
import sys

import pytest
from test_sandbox import ADD, ADD_TESTS, CHEATS, CORRECT, WRONG

import sandbox
from sandbox_filter import (
    ALLOW,
    AND,
    AT_LEAST,
    DENY,
    EQUAL,
    KILL,
    LOAD,
    MACHINES,
    NO_SUCH_CALL,
    RETURN,
    install_seccomp,
    landlock_abi,
    seccomp_program,
)
from sandbox_inside import CLONE_NEWUSER, map_ids, unshare, write_proc

MACHINE = os.uname().machine
UNSHARE, RULESET = {"x86_64": 272, "aarch64": 97}[MACHINE], 444
needs_landlock = pytest.mark.skipif(landlock_abi() < 3, reason="this kernel has no Landlock ABI 3")


# ---- the BPF program ----

def run_bpf(program: list[tuple], architecture: int, number: int, *arguments: int) -> int:
    """The verdict of a program, by the rules of classic BPF: jumps go forward and stay inside, A is one register."""
    words = {0: number, 4: architecture} | {16 + 8 * n: value & 0xFFFFFFFF for n, value in enumerate(arguments)}
    place, a = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == LOAD:
            a = words.get(operand, 0)
        elif code == AND:
            a &= operand
        elif code == EQUAL:
            place += if_true if a == operand else if_false
        elif code == AT_LEAST:
            place += if_true if a >= operand else if_false
        else:
            assert code == RETURN
            return operand


# name: (number on x86-64, on aarch64), arguments, verdict with own network and processes, verdict without both
CALLS = {
    "read": ((0, 63), (), ALLOW, ALLOW),
    "openat": ((257, 56), (), ALLOW, ALLOW),
    "execve": ((59, 221), (), ALLOW, ALLOW),
    "futex": ((202, 98), (), ALLOW, ALLOW),
    "ptrace": ((101, 117), (), DENY, DENY),
    "process_vm_writev": ((311, 271), (), DENY, DENY),
    "mount": ((165, 40), (), DENY, DENY),
    "setns": ((308, 268), (), DENY, DENY),
    "unshare": ((272, 97), (0,), DENY, DENY),
    "keyctl": ((250, 219), (), DENY, DENY),
    "bpf": ((321, 280), (), DENY, DENY),
    "io_uring_setup": ((425, 425), (), DENY, DENY),
    "userfaultfd": ((323, 282), (), DENY, DENY),
    "clone3": ((435, 435), (), NO_SUCH_CALL, NO_SUCH_CALL),
    "clone, a fork": ((56, 220), (17,), ALLOW, DENY),
    "clone, a thread": ((56, 220), (0x3D0F00,), ALLOW, ALLOW),
    "clone, a user namespace": ((56, 220), (0x10000011,), DENY, DENY),
    "clone, a network namespace": ((56, 220), (0x40000011,), DENY, DENY),
    "clone, a cgroup namespace": ((56, 220), (0x02000011,), DENY, DENY),
    "socket, AF_UNIX": ((41, 198), (1, 1), ALLOW, DENY),
    "socket, AF_INET": ((41, 198), (2, 1), DENY, DENY),
    "socket, vsock": ((41, 198), (40, 1), DENY, DENY),
    "socket, AF_INET below junk": ((41, 198), (0x1_0000_0002, 1), DENY, DENY),
    "socketpair, stream": ((53, 199), (1, 1 | 0o2000000), ALLOW, ALLOW),
    "socketpair, datagram": ((53, 199), (1, 2), ALLOW, DENY),
    "shmget": ((29, 194), (), ALLOW, DENY),
    "fchmodat": ((268, 53), (), ALLOW, DENY),
    "setpriority": ((141, 140), (), ALLOW, DENY),
    "prlimit64, own": ((302, 261), (0,), ALLOW, ALLOW),
    "prlimit64, other": ((302, 261), (77,), ALLOW, DENY),
    "kill, itself": ((62, 129), (4321, 9), ALLOW, ALLOW),
    "kill, its group": ((62, 129), (0, 9), ALLOW, ALLOW),
    "kill, another": ((62, 129), (77, 9), ALLOW, DENY),
    "kill, all": ((62, 129), (-1, 9), ALLOW, DENY),
    "tgkill, another": ((234, 131), (77, 77, 9), ALLOW, DENY),
    "pidfd_send_signal": ((424, 424), (), ALLOW, DENY),
    "fcntl, flags": ((72, 25), (3, 3), ALLOW, ALLOW),
    "fcntl, owner": ((72, 25), (3, 8, 77), ALLOW, DENY),
    "ioctl, terminal": ((16, 29), (1, 0x5401), ALLOW, ALLOW),
    "ioctl, owner": ((16, 29), (1, 0x8901), ALLOW, DENY),
}


@pytest.mark.parametrize("column, machine", list(enumerate(MACHINES)))
def test_the_program_on_both_machines(column, machine):
    walled = seccomp_program(machine, network=True)
    bare = seccomp_program(machine, network=False, own_pid=4321)
    for name, (numbers, arguments, with_walls, without) in CALLS.items():
        assert run_bpf(walled, MACHINES[machine], numbers[column], *arguments) == with_walls, name
        assert run_bpf(bare, MACHINES[machine], numbers[column], *arguments) == without, name
    for program in (walled, bare):
        assert len(program) < 4096 and all(max(line[1:3]) < 256 for line in program)
        for architecture in {*MACHINES.values(), 0x40000003, 0x40000028} - {MACHINES[machine]}:  # i386, 32-bit Arm
            assert run_bpf(program, architecture, 0) == KILL
    assert run_bpf(seccomp_program("x86_64", True), MACHINES["x86_64"], 0x40000000) == KILL  # x32


def in_child(body: str) -> str:
    """What a process prints that puts on filters and tries `body`."""
    script = f"""
import ctypes, os, signal, socket, subprocess, sys, tempfile, threading
from sandbox_filter import *
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
def tried(action, *arguments):
    try: action(*arguments)
    except OSError as exc: return exc.errno
    return 0
{body}"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_seccomp_on_a_live_process():
    assert in_child("""
import fcntl
install_seccomp(seccomp_program(os.uname().machine, False, os.getpid()))
print(tried(os.kill, os.getppid(), 0), tried(os.kill, os.getpid(), 0), libc.unshare(0), end=" ")
print(tried(socket.socket), tried(socket.socketpair), tried(fcntl.fcntl, 0, 8, os.getppid()), end=" ")
print(tried(os.chmod, "/dev/null", 0o666), tried(os.setpriority, 0, 0, 1), tried(os.fork), end=" ")
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()""") == (
        "1 0 -1 1 0 1 1 1 1 thread")


@needs_landlock
@pytest.mark.parametrize("abi", range(1, landlock_abi() + 1))
def test_landlock_on_a_live_process(tmp_path, abi):
    """A kernel accepts the attributes of every older ABI; the guards that each ABI adds are seen to be there."""
    for name in ("own", "seen", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("text")
    expected = {"read": 0, "read hidden": 13, "list hidden": 13, "write seen": 13, "write own": 0, "rename": 0,
                "delete seen": 13, "truncate seen": 13 if abi >= 3 else 0, "tcp": 13 if abi >= 4 else 111,
                "signal": 1 if abi >= 6 else 0, "null": 0}
    assert json.loads(in_child(f"""
import json
os.chdir({str(tmp_path)!r})
install_landlock({abi}, ["/usr", "/lib", "/dev/null", "seen"], ["own"])
print(json.dumps({{
    "read": tried(open, "seen/file"), "read hidden": tried(open, "hidden/file"),
    "list hidden": tried(os.listdir, "hidden"),
    "write seen": tried(open, "seen/file", "r+"), "write own": tried(open, "own/more", "w"),
    "rename": tried(os.rename, "own/more", "own/most"), "delete seen": tried(os.remove, "seen/file"),
    "truncate seen": tried(os.truncate, "seen/file", 0), "tcp": tried(socket.socket().connect, ("127.0.0.1", 9)),
    "signal": tried(os.kill, os.getppid(), 0), "null": tried(open, "/dev/null", "w")}}))""")) == expected


# ---- the rungs ----

DRIVER = """
import json, sys
from types import SimpleNamespace
import sandbox
isolation, samples, tests, reference = json.load(sys.stdin)
files = {"tests/test_solution.py": tests.encode(), "solution/solution.py": reference.encode()}
with sandbox.Sandbox(1, timeout_s=2, memory_mb=256, isolation=isolation) as box:
    verdicts = [box.grade(SimpleNamespace(id="t", files=files), {"solution.py": code}) for code in samples]
print(json.dumps([box.level, [(v.outcome, v.reward, v.output) for v in verdicts]]))
"""


def ordinary_user() -> None:
    if os.getuid() == 0:  # an ordinary uid in here, which outside still reaches the interpreter below /root
        unshare(CLONE_NEWUSER)
        map_ids(0, 0)


def refusing(*numbers: int):
    """A start-up function after which these system calls give EPERM, as in a container of the usual profile."""
    lines = [(LOAD, 0, 0, 0), *[line for n in numbers for line in ((EQUAL, 0, 1, n), (RETURN, 0, 0, DENY))],
             (RETURN, 0, 0, ALLOW)]

    def start() -> None:
        ordinary_user()
        ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
        install_seccomp(lines)
    return start


def no_network_namespace() -> None:
    """As on machines that set user.max_net_namespaces to 0."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    write_proc("/proc/self/setgroups", "deny")
    write_proc("/proc/self/uid_map", f"0 {uid} 1")
    write_proc("/proc/self/gid_map", f"0 {gid} 1")
    write_proc("/proc/sys/user/max_net_namespaces", "0")
    unshare(CLONE_NEWUSER)
    map_ids(0, 0)


def grade_all(start, samples: dict[str, str], isolation: str = "auto", tests: str = ADD_TESTS, reference: str = ADD):
    done = subprocess.run([sys.executable, "-c", DRIVER], text=True, capture_output=True, check=False, timeout=120,
                          preexec_fn=start, input=json.dumps([isolation, list(samples.values()), tests, reference]))
    assert done.returncode == 0, done.stderr
    level, verdicts = json.loads(done.stdout)
    return level, dict(zip(samples, verdicts, strict=True))


LOOK = {
    "shared memory": "import ctypes; print(ctypes.CDLL(None).shmget(0, 4096, 0o1600))",
    "signals": "import os\ntry: os.kill({pid}, 9); print('killed')\nexcept OSError: print(-1)",
    "limits": "import resource\ntry: resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1)); print('set')\n"
              "except OSError: print(-1)",
    "abstract socket": "import socket\ntry: socket.socket(socket.AF_UNIX).connect('\\0x'); print('in')\n"
                       "except OSError as e: print(-1 if e.errno in (1, 111) else e)",
    "other runs": "import glob; print(-1 if glob.glob('/tmp/sandbox-*') + glob.glob('/proc/[0-9]*/cmdline') in "
                  "([], ['/proc/1/cmdline']) else 'seen')",
    "the tests": "import glob, os\nprint(-1 if not glob.glob(os.path.dirname(os.getcwd()) + '/sandbox-tests*/*') + "
                 "glob.glob('/tests/*') else 'seen')",
}


FORKS = {"subprocess", "interpreter", "forked child that returns"}  # not on the rung without namespaces


def hostile(level: str, start) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        looks = {name: f"{text.replace('{pid}', str(bystander.pid))}\n" + ADD for name, text in LOOK.items()}
        if level == "mounts":  # a namespace of its own makes it harmless
            del looks["shared memory"]
        right = {f"right: {name}": code + ADD for name, code in CORRECT.items()
                 if level == "mounts" or name not in FORKS}
        fork = "import os\nif os.fork() == 0:\n    os.setsid()\n" + ADD
        reached, verdicts = grade_all(start, CHEATS | right | looks | {"spoilt": WRONG, "fork": fork, "after": ADD})
        assert reached == level and bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    for name in {*CHEATS, "spoilt"}:
        assert verdicts[name][0] in ("failed", "error") and verdicts[name][1] == 0, (name, verdicts[name])
    for name in {*right, "after"}:
        assert verdicts[name][0] == "passed", (name, verdicts[name])
    assert {name: verdicts[name][2].strip() for name in looks} == dict.fromkeys(looks, "-1")
    assert verdicts["fork"][0] == ("passed" if level == "mounts" else "error")


def test_without_network_namespaces():
    hostile("mounts", no_network_namespace)


@needs_landlock
def test_without_namespaces():
    hostile("landlock", refusing(UNSHARE))


def test_refusal_names_every_rung():
    with pytest.raises(AssertionError) as caught:
        grade_all(refusing(UNSHARE, RULESET), {"one": ADD})
    for words in ("network: ", "unshare", "mounts: ", "landlock: ", "Landlock ABI 0", '"isolation": "none"'):
        assert words in str(caught.value)
    assert grade_all(refusing(UNSHARE, RULESET), {"one": ADD}, "none")[1]["one"][0] == "passed"


def test_all_capabilities_are_gone():
    code = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')])\n" + ADD
    with sandbox.Sandbox(1) as box:
        if box.level == "landlock":
            pytest.skip("this machine has no user namespaces")
    _, verdicts = grade_all(None, {"look": code})
    assert verdicts["look"][2].strip() == str(["0" * 16] * 5)
