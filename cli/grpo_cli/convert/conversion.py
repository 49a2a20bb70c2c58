"""Files of other trainers -> a GRPOJob's manifest and what became of every option. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.convert.apply import apply
from grpo_cli.convert.draft import Draft, lines
from grpo_cli.convert.read import Source
from grpo_cli.convert.rows import Finding, Kind
from grpo_cli.convert.settle import Given, settle
from grpo_operator import names
from grpo_operator.api import parse_spec

_FIRST = ("accelerate",)  # what a trainer's own file says has precedence


@dataclass(frozen=True, slots=True)
class Conversion:
    """A manifest, and what became of every option."""

    manifest: str
    spec: dict[str, Any]
    findings: tuple[Finding, ...]

    @property
    def left(self) -> tuple[Finding, ...]:
        """What training would do differently without."""
        return tuple(finding for finding in self.findings if finding.kind is Kind.LEFT)


def convert(sources: Sequence[Source], given: Given, name: str | None = None) -> Conversion:
    """The job that does what `sources` say. Raises ValueError naming the option, or the field that no value could be found for."""
    trained = {source.format for source in sources} - set(_FIRST)
    if len(trained) > 1:
        raise ValueError(f"files of one trainer go together, beside accelerate's; these are of {', '.join(sorted(trained))}")
    draft = Draft()
    for source in sorted(sources, key=lambda source: source.format not in _FIRST):
        apply(source, draft)
    settle(draft, given)
    spec = draft.spec()
    parse_spec(spec)
    return Conversion(_manifest(name or _name(spec), spec, draft), spec, tuple(draft.findings))


def _name(spec: dict[str, Any]) -> str:
    model = spec["model"]
    last = str(model.get("name") or model.get("path")).rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-") or "grpo"


def _manifest(name: str, spec: dict[str, Any], draft: Draft) -> str:
    left = [finding for finding in draft.findings if finding.kind is Kind.LEFT]
    head = ["# Written by `grpo convert`. See what it becomes: grpo render FILE"]
    if left:
        head.append("# Not taken over:")
        head += [f"#   {finding.name} = {finding.value}: {finding.note}" for finding in left]
    if "claimName" not in spec.get("storage", {}):
        head.append("# Name a claim in storage.claimName: without one, checkpoints go with the pods.")
    body = [f"apiVersion: {names.API_VERSION}", f"kind: {names.KIND}", "metadata:", f"  name: {name}", "spec:"]
    return "\n".join([*head, *body, *lines(spec, draft.comments, indent=1)]) + "\n"
