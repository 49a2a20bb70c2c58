"""The jobs that one edit of a manifest makes, for `grpo plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from grpo_operator.api.spec import parse_spec
from grpo_operator.layout.contracts import make_contract
from grpo_operator.layout.job import Job
from grpo_operator.layout.pods import pod_template
from grpo_operator.layout.topology import plan_topology
from grpo_spec.contract import Contract
from grpo_spec.gpus import bytes_of_node
from grpo_workload.capacity.edits import Edit, candidates, edited


def contract_of(job: Job) -> Contract:
    """Return the contract of a job's first attempt."""
    return make_contract(job, plan_topology(job), 0)


def edits(job: Job, spec: Mapping[str, Any]) -> Iterator[tuple[Edit, Contract]]:
    """Yield the edits of a job that its spec accepts, each with the contract that it makes."""
    for edit in candidates(contract_of(job)):
        try:
            yield edit, contract_of(dataclasses.replace(job, spec=parse_spec(edited(spec, edit))))
        except ValueError:  # a rule of the spec refuses it
            continue


def pod_sizes(job: Job) -> tuple[dict[str, int], dict[str, int]]:
    """Return what pod templates say, by group: limits of host memory, and the memory of the GPUs that they select."""
    from kubernetes.utils.quantity import parse_quantity  # late: it loads a client of all kinds

    limits, gpus = {}, {}
    for group in plan_topology(job).groups:
        pod = pod_template(job, group, 0)["spec"]
        resources = pod["containers"][0].get("resources") or {}
        limit = str((resources.get("limits") or {}).get("memory", ""))
        with suppress(ValueError):  # it is the API server that refuses what is no quantity
            limits[group.spec.name] = int(parse_quantity(limit))
        if (size := bytes_of_node(pod.get("nodeSelector", {}))) is not None:
            gpus[group.spec.name] = size
    return limits, gpus
