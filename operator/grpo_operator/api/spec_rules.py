"""Rules of a GRPOJob's spec that hold between its sections. Those of one section stand in its model."""

from __future__ import annotations

from grpo_spec.generation import Topology
from grpo_spec.schema import Rule

_PORTS = (
    "[self.rendezvous.port, self.rendezvous.statusPort]"
    " + (has(self.generation.server) ? [self.generation.server.port, self.generation.server.transferPort] : [])"
    " + (has(self.generation.nodeLocal)"
    " ? [self.generation.nodeLocal.port, self.generation.nodeLocal.transferPort] : [])"
)
_RANKS = "g.replicas * (g.gpus - (has(self.generation.nodeLocal) ? self.generation.nodeLocal.gpusPerNode : 0))"

SPEC_RULES = (
    Rule(
        "self.device.type != 'cpu' || self.model.dtype != 'float16'",
        "model.dtype float16 needs device.type cuda: hardly any CPU supports it; bfloat16 would work",
        lambda s: s.device.type != "cpu" or s.model.dtype != "float16",
    ),
    Rule(
        "!has(self.generation.nodeLocal) || self.trainer.groups.all(g, g.gpus > self.generation.nodeLocal.gpusPerNode)",
        "generation.nodeLocal.gpusPerNode must leave every trainer pod at least one GPU to train on",
        lambda s: (
            s.generation.node_local is None
            or all(g.gpus > s.generation.node_local.gpus_per_node for g in s.trainer.groups)
        ),
        lambda s: max(1, min(g.gpus for g in s.trainer.groups) - 1),
        "[1, self.trainer.groups.map(g, g.gpus).min() - 1].max()",
    ),
    Rule(
        f"self.trainer.groups.map(g, {_RANKS}).sum() % self.parallelism.sequence == 0",
        "parallelism.sequence must divide the number of GPUs that train; 1 does",
        lambda s: s.num_ranks % s.parallelism.sequence == 0,
    ),
    Rule(
        "!has(self.generation.nodeLocal) || !has(self.generation.nodeLocal.devices) || "
        "self.generation.nodeLocal.devices.all(d, self.trainer.groups.all(g, d < g.gpus))",
        "generation.nodeLocal.devices must exist in every trainer pod (0 to gpus - 1 of the smallest pod)",
        lambda s: all(
            d < g.gpus
            for d in ((s.generation.node_local and s.generation.node_local.devices) or ())
            for g in s.trainer.groups
        ),
        lambda s: min(g.gpus for g in s.trainer.groups) - 1,
        "self.trainer.groups.map(g, g.gpus).min() - 1",
    ),
    Rule(
        "self.generation.topology != 'Colocate' || self.generation.tensorParallel == 1 || "
        "self.trainer.groups.all(g, g.gpus % self.generation.tensorParallel == 0)",
        "generation.tensorParallel must divide gpus of every trainer group, because a tensor-parallel group cannot "
        "span pods; 1 always does",
        lambda s: (
            s.generation.topology is not Topology.COLOCATE
            or all(g.gpus % s.generation.tensor_parallel == 0 for g in s.trainer.groups)
        ),
    ),
    Rule(
        "!has(self.generation.server) || "
        "self.generation.server.groups.all(g, self.trainer.groups.all(t, t.name != g.name))",
        "groups of trainer.groups and generation.server.groups must have different names: each becomes a StatefulSet",
        lambda s: (
            s.generation.server is None
            or not {g.name for g in s.generation.server.groups} & {g.name for g in s.trainer.groups}
        ),
    ),
    Rule(
        "!has(self.lora) || self.lora.push != 'adapters' || !has(self.generation.server) || "
        "self.generation.server.groups.all(g, g.podsPerEngine == 1)",
        "lora.push adapters needs podsPerEngine 1 in all generation.server.groups",
        lambda s: (
            not s.pushes_adapters
            or s.generation.server is None
            or all(g.pods_per_engine == 1 for g in s.generation.server.groups)
        ),
    ),
    Rule(
        # With neither, a rule of rendezvous says it for less.
        "!has(self.generation.server) && !has(self.generation.nodeLocal) || "
        f"({_PORTS}).all(p, ({_PORTS}).exists_one(q, q == p))",
        "rendezvous.port, rendezvous.statusPort and the ports of generation must all differ",
        lambda s: len(set(s.ports)) == len(s.ports),
    ),
    Rule(
        "self.rewards.all(r, r.timeoutSeconds <= self.rendezvous.timeoutSeconds)",
        "rewards[].timeoutSeconds must be at most rendezvous.timeoutSeconds, after which the other ranks give up",
        lambda s: all(r.timeout_seconds <= s.rendezvous.timeout_seconds for r in s.rewards),
        lambda s: s.rendezvous.timeout_seconds,
        "self.rendezvous.timeoutSeconds",
    ),
    Rule(
        "!has(self.evaluation) || !has(self.evaluation.rewards) || "
        "self.evaluation.rewards.all(r, r.timeoutSeconds <= self.rendezvous.timeoutSeconds)",
        "evaluation.rewards[].timeoutSeconds must be at most rendezvous.timeoutSeconds, after which the other "
        "ranks give up",
        lambda s: all(r.timeout_seconds <= s.rendezvous.timeout_seconds for r in s.evaluation_rewards),
        lambda s: s.rendezvous.timeout_seconds,
        "self.rendezvous.timeoutSeconds",
    ),
    Rule(
        "!has(self.scheduling) || !has(self.scheduling.timeoutSeconds) || "
        "self.scheduling.timeoutSeconds <= self.rendezvous.timeoutSeconds",
        "scheduling.timeoutSeconds must be at most rendezvous.timeoutSeconds, after which pods that run give up on "
        "those that have no node",
        lambda s: (s.scheduling.timeout_seconds or 0) <= s.rendezvous.timeout_seconds,
        lambda s: s.rendezvous.timeout_seconds,
        "self.rendezvous.timeoutSeconds",
    ),
    Rule(
        "!has(self.scheduling) || !has(self.scheduling.gang) || !has(self.podTemplate) || "
        "!has(self.podTemplate.schedulerName)",
        "scheduling.gang Native is for Kubernetes' own scheduler: podTemplate.schedulerName must not be set; "
        "others have labels or annotations of their own for gangs (commonLabels, commonAnnotations)",
        lambda s: s.scheduling.gang is None or s.pod_template.scheduler_name is None,
    ),
    Rule(
        "self.failurePolicy.onGenerationFailure != 'RestartGeneration' || self.generation.topology == 'Server'",
        "failurePolicy.onGenerationFailure RestartGeneration needs topology Server, where engines have their own "
        "pods; use RestartAll otherwise",
        lambda s: (
            s.failure_policy.on_generation_failure != "RestartGeneration" or s.generation.topology is Topology.SERVER
        ),
    ),
    Rule(
        "!has(self.generation.server) || !has(self.generation.server.elastic) || "
        "self.failurePolicy.onGenerationFailure == 'RestartGeneration'",
        "generation.server.elastic needs failurePolicy.onGenerationFailure RestartGeneration, with which ranks go "
        "on when an engine leaves",
        lambda s: (
            s.generation.server is None
            or s.generation.server.elastic is None
            or s.failure_policy.on_generation_failure == "RestartGeneration"
        ),
    ),
    Rule(
        "!has(self.generation.server) || !has(self.generation.server.elastic) || "
        "!has(self.generation.server.elastic.minReplicas) || self.training.maxStaleness > 0",
        "generation.server.elastic.minReplicas needs training.maxStaleness of at least 1: with 0, ranks and "
        "engines take turns, and no number of engines balances them",
        lambda s: (
            s.generation.server is None
            or s.generation.server.elastic is None
            or s.generation.server.elastic.min_replicas is None
            or s.training.max_staleness > 0
        ),
    ),
)
"""Each is given a GRPOJobSpec."""
