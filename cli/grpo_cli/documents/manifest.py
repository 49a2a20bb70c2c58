"""Manifests: what kubectl would apply of a file, with every GRPOJob in it checked as the API server checks it."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_cli.documents.yaml_values import read_yaml
from grpo_cli.errors import CliError, Exit
from grpo_cli.screen.origins import queue_label
from grpo_operator.api import names
from grpo_operator.api.faults import explain
from grpo_operator.api.pod_requests import PodRequests
from grpo_operator.api.site import Layers
from grpo_operator.api.spec import GRPOJobSpec, read_written
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.stored_spec import read_spec
from grpo_operator.api.strict import read_strictly
from grpo_operator.layout.job import Job
from grpo_spec.schema import LabelKey

Document = dict[str, Any]
_LabelValue = Annotated[str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]


class InvalidManifest(CliError):  # noqa: N818 - named as click names its exceptions
    """A manifest that cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.INVALID)


@dataclass(frozen=True, slots=True)
class JobDocument:
    """The document of a GRPOJob as it is sent to an API server, and its spec."""

    document: Document
    spec: GRPOJobSpec

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.document["metadata"]["name"])

    def job(self, namespace: str, layers: Layers | None = None) -> Job:
        """Return the job as the operator would read it from a cluster where the site sets `layers`.

        `namespace` if the document names none. Raises InvalidManifest if the site refuses the job.
        """
        spec = self.spec
        if layers:
            stored = read_spec(self.document["spec"], GRPOJobStatus(), layers, queue_label(self.document))
            if stored.refused is not None:
                raise InvalidManifest(f"job {self.name}: {stored.refused}")
            spec = stored.spec
        return Job(
            namespace=self.document["metadata"].get("namespace", namespace),
            name=self.name,
            uid=str(uuid.uuid4()),
            generation=1,
            spec=spec,
            requests=PodRequests(),
        )


class _Metadata(BaseModel):
    """Metadata of a GRPOJob: fields that people write, and those that the API server adds."""

    model_config = ConfigDict(extra="forbid")

    name: str
    namespace: str | None = None
    labels: dict[LabelKey, _LabelValue] = Field(default_factory=dict)
    annotations: dict[LabelKey, str] = Field(default_factory=dict)
    finalizers: list[str] = Field(default_factory=list)
    ownerReferences: list[dict[str, Any]] = Field(default_factory=list)  # noqa: N815 - Kubernetes' name
    generateName: str | None = None  # noqa: N815
    uid: str | None = None
    resourceVersion: str | None = None  # noqa: N815
    generation: int | None = None
    creationTimestamp: str | None = None  # noqa: N815
    deletionTimestamp: str | None = None  # noqa: N815
    deletionGracePeriodSeconds: int | None = None  # noqa: N815
    selfLink: str | None = None  # noqa: N815
    managedFields: list[dict[str, Any]] = Field(default_factory=list)  # noqa: N815


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    apiVersion: str  # noqa: N815
    kind: str
    metadata: _Metadata
    spec: dict[str, Any]
    status: dict[str, Any] | None = None


def load_documents(path: Path) -> list[Document | JobDocument]:
    """Return the documents of a file in their order, each GRPOJob checked.

    Raises InvalidManifest for one that kubectl would not take, naming it and its field.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise InvalidManifest(f"{path}: not YAML: {error}") from error
    return read_documents(text, str(path))


def read_documents(text: str, source: str) -> list[Document | JobDocument]:
    """Return the documents of a text as load_documents does; messages begin with `source`."""
    try:
        values = read_yaml(text)
    except ValueError as error:
        raise InvalidManifest(f"{source}: not YAML: {error}") from error
    found = [one for value in values if value is not None for one in _items(value, source)]
    read: list[Document | JobDocument] = []
    for number, one in enumerate(found, 1):
        try:
            read.append(read_job(one) if _is_job(one) else _other(one))
        except ValueError as error:
            raise InvalidManifest(f"{source}: {nth(number, found)}{error}") from error
    return read


def nth(number: int, documents: Sequence[object]) -> str:
    """Return how an error about one of the documents begins; empty where there is one only."""
    return f"document {number} of {len(documents)}: " if len(documents) > 1 else ""


def load_job(path: Path) -> JobDocument:
    """Return the only GRPOJob of a file. Raises InvalidManifest."""
    return only_job(load_documents(path), str(path))


def load_jobs(path: Path) -> list[Document | JobDocument]:
    """Return the documents of a file, of which at least one is a GRPOJob. Raises InvalidManifest."""
    documents = load_documents(path)
    if not any(isinstance(one, JobDocument) for one in documents):
        raise InvalidManifest(f"{path}: there is no {names.KIND}; found: {_kinds(documents)}")
    return documents


def only_job(documents: Sequence[Document | JobDocument], source: str) -> JobDocument:
    """Return the GRPOJob of documents that must have one. Raises InvalidManifest."""
    jobs = [one for one in documents if isinstance(one, JobDocument)]
    if len(jobs) != 1:
        raise InvalidManifest(f"{source}: write exactly one {names.KIND}; found: {_kinds(documents)}")
    return jobs[0]


def _kinds(documents: Sequence[Document | JobDocument]) -> str:
    kinds = [names.KIND if isinstance(one, JobDocument) else str(one["kind"]) for one in documents]
    return ", ".join(kinds) or "nothing"


def read_job(value: object) -> JobDocument:
    """Check the document of a GRPOJob, whatever it was read from. Raises ValueError naming each wrong field.

    Fields that are null are left out, as the API server does, and 1.0 is 1.
    """
    try:
        read, document = read_strictly(_Document, as_json(value))
    except ValidationError as error:
        raise ValueError(explain(error, _Document, names.KIND).replace(f"{names.KIND}.", "")) from error
    if read.apiVersion != names.API_VERSION:
        raise ValueError(f"apiVersion is {read.apiVersion}; use {names.API_VERSION}")
    name = read.metadata.name
    try:
        spec, written = read_written(document["spec"])
    except ValueError as error:
        raise ValueError(f"job {name}: {error}") from error
    if fault := names.name_fault(name, [group.name for group in spec.pod_groups]):
        raise ValueError(f"job {name}: {fault}")
    return JobDocument({**document, "spec": written}, spec)


def as_json(value: object, path: str = "") -> Any:
    """Return a value as JSON of Kubernetes: lists, texts, numbers; whole numbers are integers.

    Raises ValueError for what JSON does not have.
    """
    match value:
        case None | bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**63 else float(value)
        case str():
            return str(value)
        case float() if not math.isfinite(value):
            raise ValueError(f"{path or 'the document'}: {value} is no number of JSON")
        case float():
            return int(value) if value.is_integer() and abs(value) < 2**63 else value
        case Mapping():
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise ValueError(f"{path or 'the document'}: the key {wrong[0]!r} must be a text")
            return {key: as_json(one, f"{path}.{key}".lstrip(".")) for key, one in value.items()}
        case list() | tuple():
            return [as_json(one, f"{path}[{place}]") for place, one in enumerate(value)]
    raise ValueError(f"{path or 'the document'}: {type(value).__name__} is no value of JSON (found {value!r})")


def _items(value: Any, source: str) -> Sequence[Any]:
    if not (isinstance(value, dict) and value.get("kind") == "List" and value.get("apiVersion") == "v1"):
        return [value]
    items = value.get("items") or []
    if not isinstance(items, list):
        raise InvalidManifest(f"{source}: items of a List must be a list (found {str(items)[:60]})")
    return items


def _is_job(value: Any) -> bool:
    return isinstance(value, dict) and value.get("kind") == names.KIND


def _other(value: Any) -> Document:
    document = as_json(value)
    if not isinstance(document, dict):
        raise ValueError(f"a document must be an object of Kubernetes (found {str(value)[:60]})")
    kind = document.get("kind")
    for field in ("apiVersion", "kind"):
        if not isinstance(document.get(field), str):
            raise ValueError(f"{kind or 'a document'}: {field} is missing, or no text")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise ValueError(f"{kind}: metadata.name is missing, or no text")
    return document
