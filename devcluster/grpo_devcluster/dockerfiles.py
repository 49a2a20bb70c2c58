"""Images from this repository's Dockerfiles: buildah, without a daemon and without a registry."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grpo_devcluster import packages, paths


class Buildah:
    """A storage of images below `scratch`, and commands on it."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._command = ["buildah", "--root", f"{scratch}/storage", "--runroot", f"{scratch}/run"]

    def __call__(self, *arguments: str, tail: int = 10) -> str:
        """Run a command of buildah and return what it prints; raise RuntimeError with its last lines if it fails."""
        return run([*self._command, *arguments], tail)

    def build(self, dockerfile: Path, tag: str, **arguments: str) -> None:
        """Build a Dockerfile on the repository, with the arguments as its ARGs. Images are never pulled."""
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        options += [f"--tag={tag}", "--network=host", "--pull-never", "--layers=false", *self._host_trust()]
        self("build", *options, "-f", str(dockerfile), str(paths.REPO), tail=40)

    def run(self, image: str, *command: str, mounts: Mapping[Path, str]) -> str:
        """Run a command in a new container of the image, as the image's user, and return what it prints.

        Args:
            image: an image of this storage.
            command: the program and its arguments.
            mounts: folders of this machine, and where the container sees them; it cannot write there.
        """
        container = self("from", "--pull-never", image).strip()
        volumes = [f"--volume={folder}:{target}:ro" for folder, target in mounts.items()]
        try:
            return self("run", "--network=host", *volumes, container, "--", *command, tail=40)
        finally:
            self("rm", container)

    def _host_trust(self) -> list[str]:
        """Return mounts by which pip and uv inside the build use this machine's certificates, and pip its index."""
        folders = ("/etc/ssl/certs", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates")
        mounts = [f"--volume={folder}:{folder}:ro" for folder in folders if Path(folder).exists()]
        options = {
            "cert": "PIP_CERT",
            "index-url": "PIP_INDEX_URL",
            "extra-index-url": "PIP_EXTRA_INDEX_URL",
            "timeout": "PIP_DEFAULT_TIMEOUT",
        }
        lines = [f"{option} = {os.environ[variable]}" for option, variable in options.items() if variable in os.environ]
        files = {"pip.conf": ["[global]", *lines, ""], "uv/uv.toml": ["native-tls = true", ""]}
        for name, content in files.items():
            path = self._scratch / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(content))
            mounts.append(f"--volume={path}:/etc/{name}:ro")
        return mounts


@contextmanager
def buildah(base: Path) -> Iterator[Buildah]:
    """Yield a storage with the image of the archive `base`; it is deleted in the end, with all that was built."""
    packages.ensure(packages.IMAGES)
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        storage = Buildah(Path(folder))
        storage("pull", f"oci-archive:{base}")
        try:
            yield storage
        finally:
            storage("rm", "--all")


def scratch() -> Path:
    """Return a folder for root file systems; /tmp may be in memory."""
    folder = paths.cache_dir() / "scratch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(command: list[str], tail: int = 10) -> str:
    """Run a command and return what it prints; raise RuntimeError with its last `tail` lines if it fails."""
    environment = {**os.environ, "STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        lines = done.stdout.splitlines()[-tail:]
        raise RuntimeError("\n".join([f"{command[0]} failed with {done.returncode}:", *lines]))
    return done.stdout
