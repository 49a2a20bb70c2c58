"""Limits for processes that run users' code. Torch-free and light: each such process imports it first.

The container already drops all capabilities, runs as an unprivileged user and mounts no service account token. But the
rank runs as the same user, so its variables and memory could be read in /proc. Landlock prevents this and needs no
privileges (Documentation/userspace-api/landlock.rst, "Ptrace restrictions"). Version 2 (Linux 5.19) is required, since
version 1 also forbids moving files between folders. A process with CAP_PERFMON could read them anyway; containers here
have no capabilities.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Collection, Mapping

_FOR_ANY_PROGRAM = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
_FOR_LIBRARIES = {"XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"}
_FOR_LIBRARIES |= {"TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"}
_ABOUT_THE_RANK = {"POD_NAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
PASSED = frozenset(_FOR_ANY_PROGRAM | _FOR_LIBRARIES | _ABOUT_THE_RANK)
"""Variables that users' code gets without asking for them; also those that begin with one of PASSED_PREFIXES."""
PASSED_PREFIXES = ("PYTHON", "LC_", "CUDA_", "OMP_", "MKL_")

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
# System calls; their numbers are the same on every architecture.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_FS_MAKE_BLOCK, _FS_REFER = 1 << 11, 1 << 13
_SCOPE_SIGNAL = 1 << 1  # since version 6, Linux 6.12


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def passed_environment(environ: Mapping[str, str], asked: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that users' code gets: those that any program needs, and those `asked` for by name."""
    return {
        name: value
        for name, value in environ.items()
        if name in PASSED or name in asked or name.startswith(PASSED_PREFIXES)
    }


def limit_memory(size: int) -> None:
    """Limit this process, and each one it starts, to `size` bytes of memory; above it Python raises MemoryError.

    This sets RLIMIT_DATA, which counts writable memory. RLIMIT_AS would also count the addresses that CUDA and mapped
    files reserve.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread of `parent` that started it ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def isolate() -> bool:
    """Keep this process, and those it starts, from reading the variables and memory of others and from signalling them.

    Returns False if the kernel cannot do this: Landlock is not built in, is off, or is older than version 2. Signals
    are blocked from version 6 on.
    """
    libc = _libc()
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    if version < 2:
        return False
    # A ruleset must restrict something: here the creation of block devices, which containers may not do anyway.
    ruleset = _Ruleset(_FS_MAKE_BLOCK | _FS_REFER, 0, _SCOPE_SIGNAL if version >= 6 else 0)
    size = ctypes.sizeof(ruleset) if version >= 6 else 8
    rules = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        # Without this rule, files could not be moved between folders.
        free = _PathBeneath(_FS_REFER, root)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(
            rules >= 0
            and libc.syscall(_LANDLOCK_ADD_RULE, rules, _RULE_PATH_BENEATH, ctypes.byref(free), 0) == 0
            and libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0) == 0
        )
    finally:
        os.close(root)
        if rules >= 0:
            os.close(rules)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
