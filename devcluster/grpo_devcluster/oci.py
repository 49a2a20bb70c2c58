"""OCI image archives with one layer, written without a tool: a few JSON files and a tar."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One path of a root file system: a folder, unless it has content or the target of a link."""

    mode: int = 0o755
    content: bytes | None = None
    link: str | None = None
    owner: int = 0


@dataclass(frozen=True)
class ImageConfig:
    """Program, user and variables of an image; a pod may override them."""

    entrypoint: tuple[str, ...] = ()
    user: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = "/"


def layer(entries: Mapping[str, Entry]) -> bytes:
    """Return a tar of the entries; the same entries give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, entry in entries.items():
            info = tarfile.TarInfo(path.strip("/"))
            info.mode, info.uid, info.gid = entry.mode, entry.owner, entry.owner
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(entry.content)
            tar.addfile(info, io.BytesIO(entry.content or b""))
    return buffer.getvalue()


def write_archive(target: Path, name: str, layer_tar: Path, config: ImageConfig) -> Path:
    """Write the image `name` with the tar at `layer_tar` as its only layer."""
    layer_digest, layer_size = _digest_file(layer_tar), layer_tar.stat().st_size
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": list(config.entrypoint),
            "User": config.user,
            "Env": [f"{k}={v}" for k, v in config.environment.items()],
            "WorkingDir": config.directory,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        # One a layer, or buildah refuses a stage built on a stage built on this image.
        "history": [{"created_by": "grpo_devcluster"}],
    }
    config_bytes = json.dumps(image).encode()
    vendor = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{vendor}.manifest.v1+json",
        "config": _descriptor(f"{vendor}.config.v1+json", hashlib.sha256(config_bytes).hexdigest(), len(config_bytes)),
        "layers": [_descriptor(f"{vendor}.layer.v1.tar", layer_digest, layer_size)],
    }
    manifest_bytes = json.dumps(manifest).encode()
    # containerd reads the first annotation, buildah the second.
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    entry = _descriptor(f"{vendor}.manifest.v1+json", hashlib.sha256(manifest_bytes).hexdigest(), len(manifest_bytes))
    index = {"schemaVersion": 2, "mediaType": f"{vendor}.index.v1+json", "manifests": [{**entry, "annotations": names}]}

    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".writing")
    with tarfile.open(unfinished, "w") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(tar, "index.json", json.dumps(index).encode())
        for blob in (config_bytes, manifest_bytes):
            _add(tar, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        tar.add(layer_tar, f"blobs/sha256/{layer_digest}")
    unfinished.rename(target)
    return target


def _descriptor(media_type: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
