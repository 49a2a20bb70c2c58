"""The workload's image for CPUs, built from workload/Dockerfile on the devcluster's Debian.

Asserted: it holds the versions of its lock and imports all modules of the workload, its user is not root, and a job
trains a step in it with nothing from outside but its manifest and its model. It takes 8 GB of disk.
"""

import re

import pytest
import yaml

from grpo_devcluster import images
from grpo_devcluster.dockerfiles import buildah
from grpo_devcluster.paths import REPO
from support.trainer.tiny_model import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

IMAGE = "grpo.local/workload:cpu"

REPORT = """
import importlib, os, pkgutil, sysconfig
from importlib.metadata import distributions
for package in ("grpo_spec", "grpo_workload"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("user", os.getuid(), os.getgid())
for found in distributions(path=[sysconfig.get_path("purelib")]):
    print("package", found.name.lower().replace("_", "-").replace(".", "-"), found.version)
"""

JOB = {
    "apiVersion": "training.grpo.dev/v1alpha1",
    "kind": "GRPOJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "device": {"type": "cpu"},
        "model": {"path": "/job/model", "dtype": "float32"},
        "dataset": {"reasoningGym": {"dataset": "basic_arithmetic", "params": {"min_terms": 2, "max_terms": 2}}},
        "rewards": [{"name": "stopped", "stopped": {}}],
        "training": {"maxSteps": 1, "promptsPerStep": 2, "numGenerations": 2, "maxCompletionLength": 4},
        "generation": {"maxModelLen": 128, "kvCacheMemory": "64Mi", "engineArgs": {"enforce_eager": True}},
        "trainer": {"groups": [{"name": "a", "gpus": 1}]},
    },
}


@pytest.fixture(scope="module")
def storage():
    """buildah's storage with the image."""
    with buildah(images.build_base()) as storage:
        storage.build(REPO / "workload" / "Dockerfile", IMAGE, BASE=images.BASE, LOCK="cpu")
        yield storage


def test_the_workloads_image_holds_what_its_lock_says(storage):
    printed = storage.run(IMAGE, "python", "-c", REPORT, mounts={})
    assert re.search(r"^user 65532 65532$", printed, re.MULTILINE)
    held = set(re.findall(r"^package (\S+) (\S+)$", printed, re.MULTILINE))
    lock = (REPO / "requirements" / "cpu.txt").read_text()
    pins = {(name.replace(".", "-"), pin) for name, pin in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)}
    assert {name for name, _ in held} == {"grpo-operator", *(name for name, _ in pins)}
    assert {name for name, _ in held - pins} == {"grpo-operator"}  # pins of other Pythons are in the lock, too


def test_a_job_trains_a_step_in_the_workloads_image(storage, tmp_path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    tmp_path.chmod(0o755)
    printed = storage.run(IMAGE, "grpo", "run", "/job/job.yaml", "--output", "/tmp/out", mounts={tmp_path: "/job"})
    assert re.search(r"^Done +step 1/1", printed, re.MULTILINE), printed
    assert "tiny-a-0: Done" in printed
