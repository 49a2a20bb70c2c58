"""The contract of an attempt: what every pod of it reads. Pure."""

from __future__ import annotations

from grpo_operator.layout.topology import Job, Topology
from grpo_spec.contract import Contract
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
        "master_port": job.spec.rendezvous.port,
        "timeout_seconds": job.spec.rendezvous.timeout_seconds,
        "restart_engines": job.spec.failure_policy.on_generation_failure == "RestartGeneration",
        "durable": job.spec.storage.claim_name is not None,
        "micro_batch_halvings": job.micro_batch_halvings,
        "config": config.model_copy(update={"training": training}),
    }
    return Contract.model_validate(values, context=WITHOUT_RULES)


def smaller_micro_batches(training: TrainingConfig, halvings: int) -> TrainingConfig:
    """Return the section with micro-batches halved so many times. A step computes the same with them."""
    tokens, size = training.max_tokens_per_micro_batch, training.per_device_train_batch_size
    changes = {
        "max_tokens_per_micro_batch": None if tokens is None else max(1, tokens >> halvings),
        "per_device_train_batch_size": None if size is None else max(1, size >> halvings),
    }
    return training.model_copy(update=changes)
