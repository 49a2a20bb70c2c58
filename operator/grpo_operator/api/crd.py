"""Generate the CRDs, docs/fields.md and docs/defaults.txt: `python -m grpo_operator.api.crd [--check]`.

Pages show every default; the CRD of GRPOJobs itself has none for the spec (user_schema.py). Those of what a site sets
are in site_crds.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import yaml

from grpo_operator.api import names, reference_page
from grpo_operator.api.job_rules import NAME_RULES, change_rules
from grpo_operator.api.root_rules import RULES, skipped_by_the_status
from grpo_operator.api.site_crds import site_crds
from grpo_operator.api.spec import GRPOJobSpec
from grpo_operator.api.status import GRPOJobStatus
from grpo_operator.api.structural import Schema, remove_defaults, structural
from grpo_operator.api.user_schema import without_defaults

_ROOT = Path(__file__).parents[3]
FOLDERS = (_ROOT / "crds", _ROOT / "charts" / "grpo-operator" / "files")
"""Each has all CRDs, a file for each, with its name."""
FIELDS_PAGE = _ROOT / "docs" / "fields.md"
DEFAULTS_PAGE = _ROOT / "docs" / "defaults.txt"

_ATOMIC = (
    *("model", "dataset", "training", "evaluation", "lora", "storage", "device", "rendezvous"),
    *("parallelism", "network", "cache"),
)
"""Sections of the spec that server-side apply takes as a whole: one manager owns all fields of such a section, and what
the API server keeps about owners has one entry for it. It reads, compares and writes these entries at each write of the
job; with one for each of 150 fields that was a third of the work."""
_ATOMICALLY = {"x-kubernetes-map-type": "atomic"}

_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.summary.step", 0),
    ("Reward", "string", ".status.summary.reward", 0),
    ("Trainer", "string", ".status.summary.trainer", 0),
    ("Generation", "string", ".status.summary.generation", 0),
    ("Restarts", "integer", ".status.restarts.total", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Environments", "string", ".status.summary.environments", 1),
    ("Best", "string", ".status.summary.best", 1),
    ("Reason", "string", ".status.summary.reason", 1),
    ("Message", "string", ".status.summary.message", 1),
)


def whole_schema() -> Schema:
    """Return the schema of a GRPOJob, in which the rules of each section are where the section is."""
    spec, status = structural(GRPOJobSpec), structural(GRPOJobStatus)
    return {
        "type": "object",
        "description": "GRPOJob trains a language model with GRPO: one job with the roles trainer and generation.",
        "required": ["spec"],
        "properties": {
            # The API server describes these itself, and refuses a schema with more details of metadata.
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            # Until the operator has seen a job, its status says so: without it, kstatus takes a new job for done.
            "status": remove_defaults(status) | {"default": {"observedGeneration": 0}, **_ATOMICALLY},
        },
        RULES: [*NAME_RULES, *change_rules(spec)],
    }


def crd() -> Schema:
    """Return the whole CustomResourceDefinition."""
    schema = whole_schema()
    schema["properties"]["spec"] = without_defaults(schema["properties"]["spec"])
    schema[RULES] = skipped_by_the_status(schema, NAME_RULES, change_rules(schema["properties"]["spec"]))
    for section in _ATOMIC:
        schema["properties"]["spec"]["properties"][section] |= _ATOMICALLY
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.generation.server.elastic.replicas",
                "statusReplicasPath": ".status.elastic.replicas",
                "labelSelectorPath": ".status.elastic.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in _COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": "grpojob",
                "shortNames": ["grpo"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def render() -> str:
    """Return the CRD of GRPOJobs as YAML."""
    return _as_yaml(crd(), "spec.py")


def _as_yaml(one: Schema, source: str) -> str:
    header = f"# Generated by `make crds` from operator/grpo_operator/api/{source}. Do not edit.\n"
    return header + yaml.safe_dump(one, sort_keys=False, width=120)


def files() -> dict[str, str]:
    """Return the files of all CRDs by name."""
    others = {one["metadata"]["name"]: _as_yaml(one, "site_crds.py") for one in site_crds()}
    return {f"{name}.yaml": text for name, text in ({f"{names.PLURAL}.{names.GROUP}": render()} | others).items()}


def default_lines(section: Schema, path: str = "") -> Iterator[str]:
    """Yield `path: default` for each field of a section that has a default, as JSON."""
    for name, field in section["properties"].items():
        if not isinstance(default := field.get("default", {}), dict):
            yield f"{path}{name}: {json.dumps(default)}"
        inner, mark = (field["items"], "[]") if "items" in field else (field, "")
        if "properties" in inner:
            yield from default_lines(inner, f"{path}{name}{mark}.")


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when a file differs from the models.")
def main(check: bool) -> None:
    """Write the CRDs to crds/ and the chart, and the fields of GRPOJobs and their defaults to docs/."""
    schema = whole_schema()
    texts = {folder / name: text for name, text in files().items() for folder in FOLDERS} | {
        FIELDS_PAGE: reference_page.render(schema),
        DEFAULTS_PAGE: "".join(f"{line}\n" for line in default_lines(schema["properties"]["spec"])),
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        sys.exit(
            f"differs from the models: {', '.join(str(path.relative_to(_ROOT)) for path in stale)}; run `make crds`"
        )
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])


if __name__ == "__main__":
    main()
