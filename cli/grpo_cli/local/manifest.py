"""Read a job's manifest file."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import click
import yaml

from grpo_cli.screen.origins import queue_label
from grpo_operator.api import names
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.site import Layers
from grpo_operator.api.spec import GRPOJobSpec, parse_spec
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.layout.topology import Job


class InvalidManifest(click.ClickException):  # named as click names its exceptions
    """A manifest that cannot be used."""

    exit_code = 2


def load_manifest(path: Path) -> dict[str, Any]:
    """Return the checked GRPOJob of a manifest file. Raises InvalidManifest naming the field, or what was found."""
    return _load(path)[0]


def load_job(path: Path, namespace: str, layers: Layers | None = None) -> Job:
    """Return the GRPOJob of a manifest file as the operator would read it from a cluster, where the site sets `layers`.
    Raises InvalidManifest.
    """
    manifest, spec = _load(path)
    if layers:
        stored = read_spec(manifest["spec"], GRPOJobStatus(), layers, queue_label(manifest))
        if stored.refused is not None:
            raise InvalidManifest(f"{path}: {stored.refused}")
        spec = stored.spec
    metadata = manifest["metadata"]
    return Job(
        namespace=metadata.get("namespace", namespace),
        name=metadata["name"],
        uid=str(uuid.uuid4()),
        generation=1,
        spec=spec,
        requests=PodRequests(),
    )


def _load(path: Path) -> tuple[dict[str, Any], GRPOJobSpec]:
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidManifest(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    found = [document for document in documents if isinstance(document, dict) and document.get("kind") == names.KIND]
    if len(found) != 1:
        kinds = (
            ", ".join(str(document.get("kind") if isinstance(document, dict) else document) for document in documents)
            or "nothing"
        )
        raise InvalidManifest(f"{path}: write exactly one {names.KIND}; found: {kinds}")
    manifest = found[0]
    if manifest.get("apiVersion") != names.API_VERSION:
        raise InvalidManifest(f"{path}: apiVersion is {manifest.get('apiVersion')}; use {names.API_VERSION}")
    if not (name := (manifest.get("metadata") or {}).get("name")):
        raise InvalidManifest(f"{path}: metadata.name is missing: give the job a name")
    try:
        spec = parse_spec(manifest.get("spec", {}))
    except ValueError as error:
        raise InvalidManifest(f"{path}: {error}") from error
    if fault := names.name_fault(str(name), [group.name for group in spec.pod_groups]):
        raise InvalidManifest(f"{path}: {fault}")
    return manifest, spec
