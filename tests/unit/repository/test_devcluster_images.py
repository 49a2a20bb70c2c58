"""The devcluster's images and host mounts: archives are reproducible, old ones are removed, pods get what exists."""

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from grpo_devcluster import images, oci, paths, policies
from grpo_devcluster.oci import Entry, ImageConfig


def test_layer_is_the_same_for_the_same_entries() -> None:
    entries = {"etc": Entry(), "etc/passwd": Entry(0o644, b"root"), "bin": Entry(link="usr/bin")}
    assert oci.layer(entries) == oci.layer(dict(entries))


def test_archive_is_addressed_by_content(tmp_path: Path) -> None:
    layer = tmp_path / "layer.tar"
    layer.write_bytes(oci.layer({"tmp": Entry(0o1777)}))
    archive = oci.write_archive(tmp_path / "image.tar", "grpo.local/x:dev", layer, ImageConfig(("/x",), "1:1"))

    with tarfile.open(archive) as tar:
        files = {m.name: file.read() for m in tar.getmembers() if (file := tar.extractfile(m))}
    for name, data in files.items():
        if name.startswith("blobs/"):
            assert hashlib.sha256(data).hexdigest() == name.rpartition("/")[2]
    entry = json.loads(files["index.json"])["manifests"][0]
    assert entry["annotations"]["io.containerd.image.name"] == "grpo.local/x:dev"
    manifest = json.loads(files["blobs/sha256/" + entry["digest"].removeprefix("sha256:")])
    config = json.loads(files["blobs/sha256/" + manifest["config"]["digest"].removeprefix("sha256:")])
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose interpreter is reached by a second name of its folder, as uv creates it."""
    real = tmp_path / "python-3.11.9"
    (real / "bin").mkdir(parents=True)
    program = real / "bin" / "python3.11"
    program.write_text(f"#!/bin/sh\necho {tmp_path}/python-3.11\n")
    program.chmod(0o755)
    (tmp_path / "python-3.11").symlink_to(real)
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(tmp_path / "python-3.11" / "bin" / "python3.11")
    return tmp_path / "venv"


def test_the_interpreter_is_mounted_under_all_its_names(venv: Path) -> None:
    mounts = policies.mount_paths(venv, venv.parent / "repo", venv.parent / "hf")
    assert {venv, venv.parent / "python-3.11", venv.parent / "python-3.11.9", Path("/usr")} <= set(mounts)


def test_only_what_exists_is_mounted_and_the_outermost_only(venv: Path) -> None:
    (venv / "inside").mkdir()
    mounts = policies.mount_paths(venv, venv.parent / "no-such-repo", venv / "inside")
    assert venv / "inside" not in mounts
    assert all(mount.is_dir() for mount in mounts)


def test_the_policy_is_rendered_without_placeholders() -> None:
    policy, binding = policies.render([Path("/usr"), Path("/it's/here")], {"HF_HUB_OFFLINE": "1"})
    assert "${" not in json.dumps(policy)
    mounts = {v["name"]: v["expression"] for v in policy["spec"]["variables"]}["mounts"]
    assert [m["path"] for m in json.loads(mounts)] == ["/usr", "/it's/here"]
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]


def test_manifest_names_no_path_of_this_machine() -> None:
    text = (paths.MANIFESTS / "host-mounts.yaml").read_text()
    assert str(paths.REPO) not in text
    assert str(Path.home()) not in text


def test_old_archives_of_an_image_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    names = [f"operator-{age:016}.tar" for age in range(8)]
    for age, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "base-1.tar").touch()
    images.forget_old(tmp_path / names[0])
    assert {path.name for path in tmp_path.iterdir()} == {*names[: images.ARCHIVES_KEPT], "base-1.tar"}
