"""Check whether this machine can host the cluster."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from grpo_devcluster import packages

# Numbers from linux/capability.h. Mounts and cgroups need the first, bridges and iptables the second.
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12}


def obstacle() -> str | None:
    """Return why this machine cannot run the devcluster, or None if it can."""
    if platform.system() != "Linux":
        return f"kubelets need Linux, and this is {platform.system()}"
    if os.geteuid() != 0:
        return "kubelets need root, and this is not root: try again with sudo"
    if lacking := [name for name, bit in _CAPABILITIES.items() if not _effective() >> bit & 1]:
        return f"kubelets need {' and '.join(lacking)}, which this container does not give to root"
    if shutil.which("go") is None:
        return "Kubernetes is built from source, which needs Go: install Go 1.26 or newer"
    needed = packages.missing(packages.NODE | packages.IMAGES)
    if needed and shutil.which("apt-get") is None:
        return f"these programs are missing, and this is not Debian: {', '.join(needed)}"
    return None


def _effective() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
