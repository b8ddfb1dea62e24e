"""What runs inside the sandbox: the walls, and the zygotes that fork the two processes of a run.
`sandbox.py` starts this file as an interpreter of its own, once per role; it is not launched by hand.

  supervisor (sandbox.py)   one socket to each zygote, with "run" (and descriptors) and "end"
    zygote "solution"       forks, per run, the solution process (sandbox_solution.py): its files in /app, the wire
    zygote "judge"          forks, per run, the judge (sandbox_judge.py): the tests, the wire, and a socket to
                            the supervisor for job and report

A zygote is a warm interpreter that never sees a byte of the tests or of a solution, so its forks inherit
none. Each process of a run is pid 1 in its own user, mount, pid, ipc and uts namespaces: when it is killed,
the kernel kills all below it. Before its first untrusted byte the solution process puts on the filters of
sandbox_filter.py. On the rung "landlock" there are no namespaces, only the filters.
"""
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback

from sandbox_filter import TRUNCATE_ABI, install_landlock, install_seccomp, landlock_abi, seccomp_program
from sandbox_solution import solution_process
from sandbox_wire import Wire, send_frame

FOLDERS = {"solution": "app", "judge": "tests"}
NAMESPACES = ("network", "mounts")  # the rungs that have them
MORE_THREADS = 256  # of the user, where a run has no user namespace to count its own in
NOBODY = 65534  # host uid of the sandbox when started as root: process limits do not bind uid 0
PRELOAD = ("bisect", "collections", "dataclasses", "datetime", "decimal", "enum", "functools", "heapq",
           "itertools", "math", "random", "re", "string", "typing")  # what solutions import most


# ---- walls ----

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME, MS_NODIRATIME = 1, 2, 4, 8, 1024, 2048
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 32, 4096, 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
libc = ctypes.CDLL(None, use_errno=True)
python = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, as a fork must


def checked(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    checked(f"mount {target}", libc.mount(source.encode(), target.encode(), kind and kind.encode(),
                                          ctypes.c_ulong(flags), options and options.encode()))


def unshare(flags: int) -> None:
    checked("unshare", libc.unshare(flags))


def write_proc(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def map_ids(uid: int, gid: int) -> None:
    """In a new user namespace: be uid and gid 1000, which are `uid` and `gid` outside."""
    write_proc("/proc/self/setgroups", "deny")
    write_proc("/proc/self/uid_map", f"1000 {uid} 1")
    write_proc("/proc/self/gid_map", f"1000 {gid} 1")


def fork_into(flags: int) -> int:
    """os.fork, with the child in new namespaces. (unshare would need a second fork for the pid namespace.)"""
    if not flags:
        return os.fork()
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]  # clone
    python.PyOS_BeforeFork()
    child = python.syscall(number, ctypes.c_ulong(flags | signal.SIGCHLD), None, None, None, None)
    error = ctypes.get_errno()
    if child:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    if child < 0:
        raise OSError(error, f"clone: {os.strerror(error)}")
    return child


def visible_paths(packages: list[str]) -> list[str]:
    """What of the host a sandbox sees, read-only: libraries, the interpreter, its packages, some devices."""
    paths: list[str] = []
    interpreter = [sys.base_prefix, sys.prefix, *packages]
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/proc",
                 *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")),
                 *map(os.path.realpath, interpreter), *interpreter):
        if os.path.lexists(path) and not any(path == p or path.startswith(p + "/") for p in paths):
            paths.append(path)
    return paths


def wall_in_zygote(role: str, network: bool, paths: list[str]) -> None:
    """The namespaces that all runs of a zygote share: a read-only root and a network without interfaces."""
    flags = CLONE_NEWNS | (CLONE_NEWNET if network else 0)
    if os.getuid() == 0:
        unshare(flags)
        build_root(role, paths)  # while still root, who alone reaches an interpreter below a 0700 home
        become_nobody()
        checked("prctl", libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))  # or its id maps cannot be written
    else:
        uid, gid = os.getuid(), os.getgid()
        unshare(CLONE_NEWUSER | flags)
        map_ids(uid, gid)
        build_root(role, paths)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def check_landlock() -> None:
    """What the rung "landlock" needs of the machine. OSError: it lacks something."""
    if landlock_abi() < TRUNCATE_ABI:
        raise OSError(f"Landlock ABI {landlock_abi()}, needed: {TRUNCATE_ABI}")
    if os.getuid() == 0:
        drop_bounding_set()
        become_nobody()
        if not os.access(os.__file__, os.R_OK):
            raise OSError(f"started as root, and the interpreter in {sys.base_prefix} is out of reach for uid {NOBODY}")


def build_root(role: str, paths: list[str]) -> None:
    """Change the root to a small tmpfs with the given paths bound into it, all read-only."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in paths}  # before /tmp is covered
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in ("/app", "/tmp", "/dev/shm", *(("/tests", "/logs") if role == "judge" else ())):
        os.makedirs("/tmp" + path)
    for path, source in sources.items():
        target, mode = "/tmp" + path, os.fstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target if stat.S_ISDIR(mode) else os.path.dirname(target), exist_ok=True)
        if not stat.S_ISDIR(mode):
            open(target, "x").close()
        mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)
    for source in sources.values():
        os.close(source)
    os.symlink("/proc/self/fd", "/tmp/dev/fd")
    os.chdir("/tmp")
    checked("pivot_root", libc.pivot_root(b".", b"."))
    checked("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    with open("/proc/self/mountinfo") as file:
        points = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), line.split()[4]) for line in file]
    locked = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME  # no remount may lose one of these
    for point in points:
        if point != "/proc" and not point.startswith("/proc/"):  # must stay whole for a run to mount its own
            flags = os.statvfs(point).f_flag & locked
            mount("none", point, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def wall_in_run(role: str, uid: int, gid: int, paths: list[str]) -> None:
    """The part of the walls that each run has to itself."""
    map_ids(uid, gid)
    covered = [path for path in paths if path.startswith("/tmp/") and not os.path.islink(path)]
    sources = {path: os.open(path, os.O_PATH) for path in covered}  # an interpreter may live below /tmp
    for path in ("/app", "/tmp", "/dev/shm", *(("/tests", "/logs") if role == "judge" else ())):
        mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,nr_inodes=4096,mode=755")
    for path, source in sources.items():
        os.makedirs(path)
        mount(f"/proc/self/fd/{source}", path, None, MS_BIND | MS_REC)  # as read-only as its source
        os.close(source)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    write_proc("/proc/sys/user/max_user_namespaces", "0")
    socket.sethostname("sandbox")


def drop_bounding_set() -> None:
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:  # past the last, or no privilege to lose
            break


def drop_privileges() -> None:
    """All capabilities, for good."""
    drop_bounding_set()
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    checked("capset", libc.capset(header, none))
    checked("prctl", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def put_on_filters(settings: dict, folder: str) -> None:
    """seccomp, and Landlock where the kernel has it, on the solution process."""
    apart, abi = settings["level"] in NAMESPACES, landlock_abi()
    readable = [path for path in settings["paths"] if path != "/proc" and (not apart or path.startswith("/dev/"))]
    if abi:
        install_landlock(abi, ["/", *readable] if apart else readable,
                         [folder, "/tmp", "/dev/shm"] if apart else [folder])
    own_pid = None if apart else os.getpid()
    install_seccomp(seccomp_program(os.uname().machine, settings["level"] == "network", own_pid))
    if not apart:
        os.environ["TMPDIR"] = os.environ["HOME"] = tempfile.tempdir = folder


def processes_of(uid: int) -> int:
    """Processes and threads of a user, as RLIMIT_NPROC counts them."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid:
                count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:  # it just ended
            continue
    return count


def set_limits(settings: dict) -> None:
    limits = {resource.RLIMIT_AS: settings["memory_mb"] << 20, resource.RLIMIT_CPU: settings["cpu_s"],
              resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 64 << 20, resource.RLIMIT_NOFILE: 256}
    if settings["level"] in NAMESPACES:
        limits[resource.RLIMIT_NPROC] = 64
    elif settings["level"] == "landlock":
        limits[resource.RLIMIT_NPROC] = processes_of(os.getuid()) + MORE_THREADS
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


# ---- zygote ----

def start_run(settings: dict, fds: list[int], folder: str) -> int:
    """Fork the process of one run and return its pid. fds: for stdout and stderr, the wire, and, for a judge,
    the supervisor's socket; folder: where the solution or the tests are written."""
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    child = fork_into(flags if settings["level"] in NAMESPACES else 0)
    if child:
        return child
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()  # a signal to one's own process group knows no pid namespace
        output, *links = [os.dup2(fd, 200 + n) for n, fd in enumerate(fds)]
        for fd, target in ((output, 1), (output, 2), *zip(links, (3, 4), strict=False)):
            os.dup2(fd, target)
        os.closerange(3 + len(links), 256)
        run_process(settings, [socket.socket(fileno=3 + n) for n in range(len(links))], folder, uid, gid)
    except BaseException:  # noqa: BLE001, below lies the zygote's own loop
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def run_process(settings: dict, sockets: list[socket.socket], folder: str, uid: int, gid: int) -> None:
    role = settings["role"]
    try:
        if settings["level"] in NAMESPACES:
            wall_in_run(role, uid, gid, settings["paths"])
        set_limits(settings)
        if settings["level"] != "none":
            drop_privileges()
            if role == "solution":
                put_on_filters(settings, folder)
    except OSError as exc:
        text = {"setup": f"{role}: {exc}"}
        if role == "judge":
            send_frame(sockets[1], json.dumps(text).encode())
        else:
            Wire(sockets[0], parity=1).send(text)
        return
    if role == "judge":
        sys.modules["sandbox_judge"].judge_process(sockets[1], sockets[0], folder)
    else:
        solution_process(sockets[0], folder)


def end_run(child: int, wait_s: float) -> bytes:
    """End all processes of the run and reap them. Says whether the first one had been killed already, for
    which it may be given some seconds to die; and the zygote's own descriptors and private bytes."""
    deadline, status = time.monotonic() + wait_s, None
    while True:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status = code
            break
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    while True:
        for pid in children(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
    killed = status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    descriptors, memory = len(os.listdir("/proc/self/fd")), tree_memory(os.getpid(), 0)
    return f"ended {int(killed)} {descriptors} {memory}".encode()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def tree_memory(pid: int, shared: int) -> int:
    """Private bytes of a process and its descendants, less what each may still share with its zygote."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
        below = children(pid)
    except (OSError, ValueError):  # it just ended
        return 0
    own = max(0, (resident - of_files) * resource.getpagesize() - shared)
    return own + sum(tree_memory(child, shared) for child in below)


def zygote(control: socket.socket, settings: dict) -> None:
    """Serve the supervisor, one run at a time, until it hangs up or dies."""
    supervisor = os.getppid()
    sys.path += settings["packages"]
    checked("prctl", libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    if settings["role"] == "judge":
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        importlib.import_module("pytest")
        importlib.import_module("sandbox_judge")
    for name in PRELOAD:
        importlib.import_module(name)
    del sys.path[0]  # the modules of this project are not for solutions
    sys.argv, sys.dont_write_bytecode = ["solution.py"], True
    if settings["level"] == "landlock":
        check_landlock()
    elif settings["level"] in NAMESPACES:
        wall_in_zygote(settings["role"], settings["level"] == "network", settings["paths"])
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
    gc.collect()
    gc.freeze()
    shared = tree_memory(os.getpid(), 0)
    control.send(b"up")
    child, folder, failure = 0, None, b""
    while True:
        control.settimeout(0.05 if child else 1.0)
        try:
            message, fds, _, _ = socket.recv_fds(control, 64, 3)
        except TimeoutError:
            if os.getppid() != supervisor:
                break
            ours = children(os.getpid()) if child else []  # without a pid namespace orphans come here
            if sum(tree_memory(pid, shared) for pid in ours) > settings["memory_mb"] << 20:
                for pid in ours:
                    os.kill(pid, signal.SIGKILL)  # the limit on one process does not bind their sum
            continue
        if message == b"run":
            if settings["level"] not in NAMESPACES:
                folder = tempfile.mkdtemp(prefix=f"sandbox-{FOLDERS[settings['role']]}-")
            try:
                child = start_run(settings, fds, folder or "/" + FOLDERS[settings["role"]])
            except OSError as exc:
                failure = f"{settings['role']}: {exc}".encode()
            for fd in fds:
                os.close(fd)
        elif message.startswith(b"end"):
            answer = failure or end_run(child, 1.0 if message == b"end gone" else 0.0)
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            child, folder, failure = 0, None, b""
            control.send(answer)
        else:
            break
    if child:
        end_run(child, 0.0)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    control_socket = socket.socket(fileno=int(sys.argv[1]))
    try:
        zygote(control_socket, json.loads(sys.argv[2]))
    except Exception as error:  # noqa: BLE001, the supervisor must hear it
        control_socket.send(f"{type(error).__name__}: {error}".encode()[:1000])
