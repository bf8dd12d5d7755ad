"""Confine a process for good, so that it can read files and do little else.

Two barriers keep a confined process from the network; at least one is required:
- A filter of system calls (seccomp; x86-64 and AArch64) allows only the calls that reading needs.
  It refuses sockets, new processes and programs, signals, and opening a file to write.
- An empty network namespace. The kernel grants one to root with CAP_SYS_ADMIN, and to users that
  may create user namespaces.

Limits of the kernel bound memory, processor time, open files and the size of files. The package's
programs confine themselves before they read what others wrote. Only the standard library is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class NotConfined(Exception):
    """Raised if the machine cannot keep a process from the network; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """The numbers by which the kernel knows a processor's architecture and its system calls."""

    audit_arch: int
    openat: int
    mkdirat: int
    allowed: tuple[int, ...]
    """The numbers of the allowed system calls, in this order: read, write, close, fstat, lseek,
    mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, pread64, sched_yield,
    mremap, madvise, getpid, exit, fcntl, gettimeofday, getrusage, sigaltstack, gettid, futex,
    getdents64, restart_syscall, clock_gettime, exit_group, newfstatat, getrandom, statx."""


# fmt: off
_X86_64 = (
    0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 24, 25, 28, 39, 60, 72, 96, 98, 131, 186, 202,
    217, 219, 228, 231, 262, 318, 332,
)
_AARCH64 = (
    63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 67, 124, 216, 233, 172, 93, 25, 169,
    165, 132, 178, 98, 61, 128, 113, 94, 79, 278, 291,
)
# fmt: on
_MACHINES: Mapping[str, _Machine] = {
    "x86_64": _Machine(audit_arch=0xC000003E, openat=257, mkdirat=258, allowed=_X86_64),
    "aarch64": _Machine(audit_arch=0xC00000B7, openat=56, mkdirat=34, allowed=_AARCH64),
}
_OPEN_FILES = 128
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
# Instructions of the filter: load a word, jump if equal, jump if any bit is set, return.
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
# Offsets into the kernel's record for the filter: the call's number, the processor, and the lower
# half of the third argument.
_NUMBER, _ARCH, _FLAGS = 0, 4, 32
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(
    *, memory_bytes: int, cpu_s: int, file_bytes: int = 0, processor: str = platform.machine()
) -> list[str]:
    """Confine this process, and let the kernel kill it when its parent process ends.

    Args:
        memory_bytes: Bytes of address space.
        cpu_s: Seconds of processor time over the whole life of the process.
        file_bytes: Maximum size in bytes of each file that the process writes; 0: the process
            may not write files.
        processor: The processor's architecture; only tests set it. For an unknown architecture
            there is no filter of system calls.

    Returns: the barriers that keep the process from the network: `namespace`, `seccomp`, or both.
    Raises: NotConfined if neither is available; OSError.
    """
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, file_bytes),
    ):
        _lower(what, most)
    libc = ctypes.CDLL(None, use_errno=True)
    walls = []
    if not libc.unshare(_CLONE_NEWNET) or not libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        walls.append("namespace")
    # Set this after the namespace, because a change of rights cancels the signal.
    _control(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)
    _control(libc, _PR_SET_NO_NEW_PRIVS, 1)
    machine = _MACHINES.get(processor)
    if machine is not None and _filter(libc, machine, may_write=file_bytes > 0):
        walls.append("seccomp")
    # The limit counts all processes of a user and does not apply to root; the filter allows no new
    # process at all.
    if "seccomp" not in walls:
        _lower(resource.RLIMIT_NPROC, 0)
    if not walls:
        raise NotConfined(
            "neither a network namespace nor a filter of system calls is available on this "
            f"{processor}; expected one of them: use Linux with seccomp on x86-64 or AArch64, or "
            "allow user namespaces"
        )
    return walls


def _lower(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _control(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "prctl")


def _filter(libc: ctypes.CDLL, machine: _Machine, *, may_write: bool) -> bool:
    """Install the filter of system calls; return whether the kernel accepted it."""
    code = _program(machine, may_write=may_write)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and where they are.
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    return not libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_char_p(program)
    )


def _program(machine: _Machine, *, may_write: bool) -> bytes:
    """Return the filter of system calls, as a program that the kernel runs at each call.

    may_write: whether the filter allows the calls that write files and make directories.
    """
    steps: list[Sequence[int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, machine.audit_arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    writing = (machine.openat, machine.mkdirat) if may_write else ()
    for number in (*machine.allowed, *writing):
        steps += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    if not may_write:
        steps += [
            (_JUMP_EQUAL, 0, 3, machine.openat),
            (_LOAD, 0, 0, _FLAGS),
            (_JUMP_SET, 1, 0, _WRITES),
            (_RETURN, 0, 0, _ALLOW),
        ]
    steps.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
