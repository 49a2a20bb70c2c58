"""What a process that runs users' code is held to. Torch-free and light: each such process imports it first.

The container already drops all capabilities, runs as a user without rights and mounts no service account token. What is left is the rank
itself, which has the same user: its variables and memory are readable in /proc, unless the kernel says otherwise. Landlock does
(Documentation/userspace-api/landlock.rst, "Ptrace restrictions"), without any right; version 2 of it, Linux 5.19, is asked for, since the
first one also forbids to move files between folders. Who has CAP_PERFMON reads all the same; containers here have no capabilities.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Collection, Mapping

PASSED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "SSL_CERT_FILE"}
    | {"SSL_CERT_DIR", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "POD_NAME"}
    | {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
)
PASSED_PREFIXES = ("PYTHON", "LC_", "CUDA_", "OMP_", "MKL_")

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_FS_MAKE_BLOCK, _FS_REFER = 1 << 11, 1 << 13
_SCOPE_SIGNAL = 1 << 1  # since version 6, Linux 6.12


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64), ("handled_access_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def passed_environment(environ: Mapping[str, str], asked: Collection[str] = ()) -> dict[str, str]:
    """The variables of `environ` that users' code gets: those that programs need to run at all, and those `asked` for by name."""
    return {name: value for name, value in environ.items() if name in PASSED or name in asked or name.startswith(PASSED_PREFIXES)}


def limit_memory(size: int) -> None:
    """Let this process, and each that it starts, hold at most `size` bytes of its own: beyond it Python raises MemoryError.

    RLIMIT_DATA, not RLIMIT_AS: it counts memory that can be written to, and not the addresses that CUDA and mapped files reserve.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends, whatever it is at then."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def isolate() -> bool:
    """Keep this process, and all that it starts, from the variables and memory of others, and from signalling them.

    False where the kernel cannot: Landlock is not built in, off, or older than version 2; signals are held back from version 6 on.
    """
    libc = _libc()
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    if version < 2:
        return False
    # A ruleset must be about something: block devices, which no container may make anyway.
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
