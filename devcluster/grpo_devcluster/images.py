"""Images of the devcluster: small ones are written here, the operator's is built from its Dockerfile on Debian."""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from grpo_devcluster import binaries, dockerfiles, nodeconfig, oci, packages, paths
from grpo_devcluster.locks import locked
from grpo_devcluster.oci import Entry, ImageConfig
from grpo_devcluster.progress import say, step
from grpo_operator.api.names import DEFAULT_IMAGE

BASE = "grpo.local/base:dev"
OPERATOR = "grpo.local/operator:dev"
# The default image of manifests: the nodes have a stand-in under its name, so manifests need no change here.
WORKLOAD = DEFAULT_IMAGE
USER = 65532
ARCHIVES_KEPT = 5  # of each image

_BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
_BASE_DROPS = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")
_OPERATOR_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "requirements", "spec", "operator")


def _archive(name: str, key: str) -> Path:
    return paths.cache_dir() / "images" / f"{name}-{key[:16]}.tar"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _small_image(name: str, short: str, entries: Mapping[str, Entry], config: ImageConfig) -> Path:
    data = oci.layer(entries)
    target = _archive(short, _digest([name.encode(), data, repr(config).encode()]))
    if not target.exists():
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            oci.write_archive(target, name, Path(file.name), config)
    return target


def pause_archive() -> Path:
    """Return the archive of the sandbox image: one static program."""
    entries = {"pause": Entry(0o755, binaries.binary("pause").read_bytes())}
    return _small_image(nodeconfig.PAUSE_IMAGE, "pause", entries, ImageConfig(("/pause",), f"{USER}:{USER}"))


def workload_archive() -> Path:
    """Return the archive of a root file system without programs; manifests/host-mounts.yaml mounts the host's."""
    user = f"grpo:x:{USER}:{USER}:grpo:/home/grpo:/bin/sh\n"
    entries = {
        "etc": Entry(),
        "etc/passwd": Entry(0o644, f"root:x:0:0:root:/root:/bin/sh\n{user}".encode()),
        "etc/group": Entry(0o644, f"root:x:0:\ngrpo:x:{USER}:\n".encode()),
        "etc/nsswitch.conf": Entry(0o644, b"hosts: files dns\n"),
        "home": Entry(),
        "home/grpo": Entry(0o755, owner=USER),
        "tmp": Entry(0o1777),
        "var": Entry(),
        "var/tmp": Entry(0o1777),
        "run": Entry(),
        **{folder: Entry() for folder in ("bin", "dev", "lib", "lib64", "proc", "root", "sbin", "sys", "usr")},
    }
    config = ImageConfig(user=f"{USER}:{USER}", environment={"PATH": "/usr/local/bin:/usr/bin:/bin"}, directory="/tmp")
    return _small_image(WORKLOAD, "workload-base", entries, config)


def build_base() -> Path:
    """Build Debian with python3, once per Debian release; return the archive."""
    with locked(paths.cache_dir() / "images"):
        return _build_base()


def build_operator() -> Path:
    """Build the operator's image from its Dockerfile, unless no input has changed; return the archive."""
    with locked(paths.cache_dir() / "images"):
        return _build_operator(_build_base())


def _build_base() -> Path:
    suite = _os_release()["VERSION_CODENAME"]
    target = _archive("base", _digest([suite.encode(), repr((_BASE_PACKAGES, _BASE_DROPS)).encode()]))
    if target.exists():
        say(f"base image is built: {target}")
        return target
    packages.ensure(packages.IMAGES)
    with tempfile.TemporaryDirectory(dir=dockerfiles.scratch()) as scratch, step(f"build base image (Debian {suite})"):
        root, tar = Path(scratch) / "root", Path(scratch) / "layer.tar"
        include = f"--include={','.join(_BASE_PACKAGES)}"
        dockerfiles.run(["debootstrap", "--variant=minbase", include, suite, str(root), _mirror()], tail=20)
        for folder in _BASE_DROPS:
            for child in (root / folder).iterdir():
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        dockerfiles.run(["tar", "--numeric-owner", "-C", str(root), "-cf", str(tar), "."])
        return oci.write_archive(
            target, BASE, tar, ImageConfig(("/bin/sh",), environment={"PATH": "/usr/local/bin:/usr/bin:/bin"})
        )


def _build_operator(base: Path) -> Path:
    files = [f for name in _OPERATOR_INPUTS for f in _files(paths.REPO / name)]
    contents = [part for f in files for part in (str(f.relative_to(paths.REPO)).encode(), f.read_bytes())]
    target = _archive("operator", _digest([base.name.encode(), *contents]))
    if target.exists():
        say(f"operator image is built: {target}")
        return target
    with step("build operator image"), dockerfiles.buildah(base) as buildah:
        buildah.build(paths.REPO / "operator" / "Dockerfile", OPERATOR, BASE=BASE)
        unfinished = target.with_suffix(".writing")
        unfinished.unlink(missing_ok=True)
        buildah("push", "--quiet", OPERATOR, f"oci-archive:{unfinished}:{OPERATOR}")
        unfinished.rename(target)
    forget_old(target)
    return target


def forget_old(newest: Path) -> None:
    """Delete all but the newest archives of an image; other checkouts may use some of those."""
    name = newest.name.rpartition("-")[0]
    archives = sorted(newest.parent.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in archives[ARCHIVES_KEPT:]:
        path.unlink()


def _files(path: Path) -> list[Path]:
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [f for f in found if f.is_file() and "__pycache__" not in f.parts]


def _mirror() -> str:
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.split()[0]


def _os_release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines()
    return {k: v.strip('"') for k, _, v in (line.partition("=") for line in lines)}
