"""Debian packages that the nodes, the image builds and tests need; only missing ones are installed."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from grpo_devcluster.progress import say, step

# Package -> a program or file that shows that it is installed, in whatever way.
NODE = {
    "runc": "runc",
    "iptables": "iptables",
    "iproute2": "ip",
    "conntrack": "conntrack",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
}
BROWSER = {"chromium": "chromium", "chromium-driver": "chromedriver"}
IMAGES = {"debootstrap": "debootstrap", "buildah": "buildah"}
METRICS = {"prometheus": "promtool"}


def missing(wanted: Mapping[str, str]) -> list[str]:
    """Return the packages whose program or file does not exist."""
    return [package for package, sign in wanted.items() if not _present(sign)]


def ensure(wanted: Mapping[str, str]) -> None:
    """Install the missing packages by apt."""
    names = missing(wanted)
    if not names:
        return
    if shutil.which("apt-get") is None:
        raise FileNotFoundError(f"install these yourself, this is not Debian: {', '.join(names)}")
    say(f"Debian packages to install: {', '.join(names)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step("apt-get update"):
        subprocess.run(["apt-get", "update", "-qq"], env=environment, check=True, stdout=subprocess.DEVNULL)
    with step("apt-get install"):
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
        done = subprocess.run(
            install, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    if done.returncode:
        raise RuntimeError("\n".join(["apt-get install failed:", *done.stdout.splitlines()[-20:]]))


def _present(sign: str) -> bool:
    return Path(sign).exists() if sign.startswith("/") else find(sign) is not None


def find(program: str) -> str | None:
    """Like `shutil.which`, but also searches the administrator's folders that PATH may lack."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
