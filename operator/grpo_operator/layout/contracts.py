"""The contract of an attempt, which every pod of it reads, and those of environment pods. Pure."""

from __future__ import annotations

from grpo_operator.api.environment_pods import EnvironmentPodGroup
from grpo_operator.layout.groups import Group
from grpo_operator.layout.job import Job
from grpo_operator.layout.topology import Topology
from grpo_spec.contract import ENVIRONMENT_PORT, Contract, EnvironmentGroup, EnvironmentPodContract
from grpo_spec.schema import WITHOUT_RULES
from grpo_spec.training import TrainingConfig


def make_contract(job: Job, topology: Topology, attempt: int) -> Contract:
    """Return the contract that every pod of the attempt reads."""
    config = job.spec.trainer_config()
    training = smaller_micro_batches(config.training, job.micro_batch_halvings)
    values = {
        "job": job.ref,
        "attempt": attempt,
        "device": job.spec.device.type,
        "members": topology.members,
        "engines": topology.engines,
        "transfers": topology.transfers,
        "environment_pods": tuple(_addresses(job, group) for group in topology.environment_groups),
        "master_port": job.spec.rendezvous.port,
        "timeout_seconds": job.spec.rendezvous.timeout_seconds,
        "restart_engines": job.spec.failure_policy.on_generation_failure == "RestartGeneration",
        "durable": job.spec.storage.claim_name is not None,
        "micro_batch_halvings": job.micro_batch_halvings,
        "config": config.model_copy(update={"training": training}),
    }
    return Contract.model_validate(values, context=WITHOUT_RULES)


def make_environment_contract(job: Job, group: Group) -> EnvironmentPodContract:
    """Return what every pod of an environment group reads."""
    names = _served(job, group)
    values = {
        "job": job.ref,
        "group": group.name,
        "sessions": _spec(group).sessions,
        "tools": job.spec.tools,
        "environments": tuple(one for one in job.spec.environments if one.name in names),
    }
    return EnvironmentPodContract.model_validate(values, context=WITHOUT_RULES)


def _addresses(job: Job, group: Group) -> EnvironmentGroup:
    return EnvironmentGroup(
        name=group.name,
        sessions=_spec(group).sessions,
        environments=_served(job, group),
        addresses=tuple(f"{job.host(pod)}:{ENVIRONMENT_PORT}" for pod in group.pods),
    )


def _served(job: Job, group: Group) -> tuple[str, ...]:
    return _spec(group).environments or tuple(one.name for one in job.spec.environments)


def _spec(group: Group) -> EnvironmentPodGroup:
    assert isinstance(group.spec, EnvironmentPodGroup)
    return group.spec


def smaller_micro_batches(training: TrainingConfig, halvings: int) -> TrainingConfig:
    """Return the section with micro-batches halved so many times. A step computes the same with them."""
    tokens, size = training.max_tokens_per_micro_batch, training.per_device_train_batch_size
    changes = {
        "max_tokens_per_micro_batch": None if tokens is None else max(1, tokens >> halvings),
        "per_device_train_batch_size": None if size is None else max(1, size >> halvings),
    }
    return training.model_copy(update=changes)
