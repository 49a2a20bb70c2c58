"""A job's manifest file."""

from __future__ import annotations

import uuid
from pathlib import Path

import click
import yaml

from grpo_operator import names
from grpo_operator.api import parse_spec
from grpo_operator.topology import Job


def load_job(path: Path, namespace: str) -> Job:
    """The GRPOJob of a manifest file. Raises ClickException naming the field, or the documents that were found instead."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    found = [document for document in documents if document.get("kind") == names.KIND]
    if len(found) != 1:
        kinds = ", ".join(str(document.get("kind")) for document in documents) or "nothing"
        raise click.ClickException(f"{path}: one {names.KIND} is needed, found: {kinds}")
    metadata = found[0].get("metadata", {})
    try:
        spec = parse_spec(found[0].get("spec", {}))
    except ValueError as error:
        raise click.ClickException(f"{path}: {error}") from error
    return Job(
        namespace=metadata.get("namespace", namespace),
        name=metadata.get("name", "job"),
        uid=str(uuid.uuid4()),
        generation=1,
        spec=spec,
    )
