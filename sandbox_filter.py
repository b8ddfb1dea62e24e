"""Two filters that a solution process puts on itself and cannot take off, nor can what it forks: seccomp (which
system calls it may make) and Landlock (which files it may open). Both through ctypes, on x86-64 and aarch64;
neither needs a namespace or a privilege.

Calls that a solution never needs give EPERM, clone3 gives ENOSYS (the C library then uses clone, whose flags a
filter can read), and a call made for another architecture kills the process. Where namespaces are missing, the
filter stands in for them: no sockets without a network namespace; without a pid namespace no new processes (nothing
could bound or end them for sure), no signal to others and no change of their limits or priorities, no System V or
POSIX queues, and no chmod and its like, which Landlock does not know.

Left out: the judge, which runs no code of the solution and has no filters.
"""
import ctypes
import errno
import os
import stat
import struct

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
NO_SUCH_CALL = 0x00050000 | errno.ENOSYS
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF
X32_BIT = 0x40000000  # calls of the x32 ABI, under the architecture of x86-64
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE_THREAD = 0x10000
AF_UNIX, SOCK_STREAM, SOCK_SEQPACKET, SOCK_TYPE_MASK = 1, 1, 5, 15
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902  # who gets a descriptor's SIGIO

# name: number on x86-64, on aarch64 (None: no such call). Sources: asm/unistd_64.h and asm-generic/unistd.h.
NEVER = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "perf_event_open": (298, 241), "bpf": (321, 280),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "unshare": (272, 97),
    "setns": (308, 268), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "memfd_secret": (447, 447),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    "vhangup": (153, 58), "personality": (135, 92), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None)}
CLONE, CLONE3, SOCKET, SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
# Without own namespaces these reach the user's other processes, and files that no rule of Landlock guards.
SHARED = {
    "fork": (57, None), "vfork": (58, None),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgctl": (71, 187), "msgsnd": (69, 189), "msgrcv": (70, 188), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469)}
ON_SELF = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
           "sched_setparam": (142, 118), "sched_setattr": (314, 274)}  # the first argument 0 is the caller
KILLS = {"kill": (62, 129), "tgkill": (234, 131)}
OTHER_SIGNALS = {"tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
                 "pidfd_send_signal": (424, 424)}
FCNTL, IOCTL = (72, 25), (16, 29)

# Landlock, uapi/linux/landlock.h
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE  # what a rule on a file, not a folder, may hold
RIGHTS = (0, 1 << 13, 1 << 14, 1 << 15, 1 << 15, 1 << 16, 1 << 16)  # bits of rights by ABI: 13, 14, 15, 15, 16
MAKE_DEVICES, IOCTL_DEVICE = 1 << 6 | 1 << 11, 1 << 15
TRUNCATE_ABI = 3  # the first that guards against truncation
libc = ctypes.CDLL(None, use_errno=True)


def seccomp_program(machine: str, network: bool, own_pid: int | None = None) -> list[tuple]:
    """The BPF instructions (code, jump if true, jump if false, operand). `network`: the process has a network namespace
    of its own. `own_pid`: it has no namespace for processes, and this is the only one that it may touch."""
    column = list(MACHINES).index(machine)
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, MACHINES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]

    def rule(call: tuple, verdict: int) -> None:
        if call[column] is not None:
            program.extend([(EQUAL, 0, 1, call[column]), (RETURN, 0, 0, verdict)])

    def by_argument(call: tuple, argument: int, values: tuple, found: int, other: int, mask: int = 0xFFFFFFFF) -> None:
        """`found` where the low half of an argument, masked, is among the values: the kernel reads an int of it."""
        tests = [(EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
        block = [(LOAD, 0, 0, 16 + 8 * argument), (AND, 0, 0, mask), *tests,
                 (RETURN, 0, 0, other), (RETURN, 0, 0, found)]
        program.extend([(EQUAL, 0, len(block), call[column]), *block])

    for call in NEVER.values():
        rule(call, DENY)
    rule(CLONE3, NO_SUCH_CALL)
    kind = 0 if own_pid is None else CLONE_THREAD
    by_argument(CLONE, 0, (kind,), ALLOW, DENY, NEW_NAMESPACES | kind)
    if network:
        by_argument(SOCKET, 0, (AF_UNIX,), ALLOW, DENY)  # some families, as vsock, leave the namespace
    else:  # an unconnected socket of AF_UNIX reaches the host's services
        rule(SOCKET, DENY)
        by_argument(SOCKETPAIR, 1, (SOCK_STREAM, SOCK_SEQPACKET), ALLOW, DENY, SOCK_TYPE_MASK)
    if own_pid is not None:
        for call in SHARED.values():
            rule(call, DENY)
        for call in ON_SELF.values():
            by_argument(call, 0, (0,), ALLOW, DENY)
        for call in KILLS.values():
            by_argument(call, 0, (0, own_pid), ALLOW, DENY)  # 0: its own process group, alone in a session
        for call in OTHER_SIGNALS.values():
            rule(call, DENY)
        by_argument(FCNTL, 1, (F_SETOWN, F_SETOWN_EX), DENY, ALLOW)
        by_argument(IOCTL, 1, (FIOSETOWN, SIOCSPGRP), DENY, ALLOW)
    return [*program, (RETURN, 0, 0, ALLOW)]


def install_seccomp(program: list[tuple]) -> None:
    """For this process and all that it forks. OSError: the kernel refuses. no_new_privs must be set."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    if libc.prctl(22, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:  # PR_SET_SECCOMP, FILTER
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def landlock_abi() -> int:
    """The version of Landlock in this kernel, 0 where there is none."""
    return max(0, libc.syscall(444, None, ctypes.c_ulong(0), ctypes.c_uint(1)))


def install_landlock(abi: int, readable: list[str], writable: list[str]) -> None:
    """This process and all that it forks open nothing but the given paths and what lies below; devices among
    `readable` may be written to. No TCP and no signals to outside where the ABI knows them. OSError: refused."""
    rights = RIGHTS[min(abi, len(RIGHTS) - 1)] - 1
    attributes = struct.pack("QQQ", rights, 3, 3)[:8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = called("landlock", 444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, granted in ((readable, READ), (writable, rights & ~MAKE_DEVICES & ~IOCTL_DEVICE)):
            for path in paths:
                fd = os.open(path, os.O_PATH)
                try:
                    mode, allowed = os.fstat(fd).st_mode, granted
                    if stat.S_ISCHR(mode):
                        allowed |= WRITE_FILE
                    if not stat.S_ISDIR(mode):
                        allowed &= ON_FILES
                    called(f"landlock {path}", 445, ctypes.c_int(ruleset), ctypes.c_int(1),
                           struct.pack("=Qi", allowed & rights, fd), ctypes.c_uint(0))
                finally:
                    os.close(fd)
        called("landlock", 446, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def called(what: str, *arguments: object) -> int:
    """A system call by number. OSError: it failed."""
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
