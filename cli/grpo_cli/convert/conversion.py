"""Files of other trainers -> the manifest of a GRPOJob, and what became of every option. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from grpo_cli.convert.apply import apply, apply_defaults
from grpo_cli.convert.draft import Draft, files_to_yaml, to_yaml
from grpo_cli.convert.python.trainer import FOLDER
from grpo_cli.convert.rows import Finding, Kind, Source
from grpo_cli.convert.settle import Given, settle
from grpo_operator.api import names
from grpo_operator.api.spec import parse_spec

_LARGEST = 1_000_000  # letters of a ConfigMap


@dataclass(frozen=True, slots=True)
class Conversion:
    """A manifest, and what became of every option."""

    manifest: str
    spec: dict[str, Any]
    findings: tuple[Finding, ...]

    @property
    def left(self) -> tuple[Finding, ...]:
        """Findings of options that the job does not take over."""
        return tuple(finding for finding in self.findings if finding.kind is Kind.LEFT)


def convert(sources: Sequence[Source], given: Given, name: str | None = None) -> Conversion:
    """Return the job that does what `sources` say. Raises ValueError naming the option or the field that is wrong."""
    trained = {source.format for source in sources} - {"accelerate"}
    if len(trained) > 1:
        found = ", ".join(sorted(trained))
        raise ValueError(f"give files of one trainer, and accelerate's; these are of {found}")
    draft = Draft()
    # accelerate's are first, so that what the trainer is told has precedence.
    sources = sorted(sources, key=lambda source: (source.format != "accelerate", source.is_command))
    files = {PurePath(source.file).name for source in sources}
    for source in sources:
        named = {option for option, value in source.options.items() if _is_of(value, files)}
        for option in sorted(named):
            draft.find(Kind.NOT_NEEDED, option, source.options[option], "that file is read, too", "")
        if source.rows:
            draft.facts["rows"] = source.rows
        if source.preprocess:
            draft.set("dataset.preprocess", source.preprocess, "the script's map")
        apply(replace(source, options={k: v for k, v in source.options.items() if k not in named}), draft)
    for format_ in dict.fromkeys(source.format for source in sources):
        apply_defaults([source for source in sources if source.format == format_], draft)
    settle(draft, given)
    name = name or _name(draft)
    moved = next((source for source in sources if source.files), None)
    if moved:
        _mount(moved, draft, name)
    spec = draft.spec()
    parse_spec(spec)
    return Conversion(_manifest(name, spec, draft, moved), spec, tuple(draft.findings))


def _is_of(value: Any, files: set[str]) -> bool:
    return isinstance(value, str) and PurePath(value).suffix != "" and PurePath(value).name in files


def _name(draft: Draft) -> str:
    model = draft.fields.get("model.name") or draft.fields["model.path"]
    last = str(model).rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-") or "grpo"


def _mount(moved: Source, draft: Draft, name: str) -> None:
    """Give the pods what was taken of a script."""
    if (size := sum(map(len, moved.files.values()))) > _LARGEST:
        raise ValueError(f"the script's code and rows have {size} letters, and a ConfigMap holds 1 MiB: use an image")
    draft.fields.setdefault("podTemplate.env", []).append({"name": "PYTHONPATH", "value": FOLDER})
    draft.set("podTemplate.volumes", [{"name": "code", "configMap": {"name": f"{name}-code"}}])
    draft.set("podTemplate.volumeMounts", [{"name": "code", "mountPath": FOLDER}])
    if moved.packages:
        note = "imported by the script's code: they must be in the image (docs/custom-image.md)"
        draft.find(Kind.DIFFERENT, "packages", ", ".join(moved.packages), note, "image")


def _manifest(name: str, spec: dict[str, Any], draft: Draft, moved: Source | None) -> str:
    left = [finding for finding in draft.findings if finding.kind is Kind.LEFT]
    head = ["# Written by `grpo convert`. See what it becomes: grpo render FILE"]
    if left:
        head.append("# Not taken over:")
        head += [f"#   {finding.name} = {finding.value}: {finding.note}" for finding in left]
    if "claimName" not in spec.get("storage", {}):
        head.append("# Name a claim in storage.claimName: without one, checkpoints are lost with the pods.")
    if moved:
        head.append(files_to_yaml(f"{name}-code", moved.files) + "---")
    document = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
    comments = {f"spec.{path}": comment for path, comment in draft.comments.items()}
    return "\n".join(head) + "\n" + to_yaml(document, comments)
