"""`spec.generation`: which engine generates completions, and on which GPUs of which pods."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_operator.api.pod_template import GpuGroup, list_map
from grpo_spec.generation import GenerationConfig, Topology
from grpo_spec.schema import Rule, Section


class GenerationGroup(GpuGroup):
    """Generation pods of one kind; each, or `podsPerEngine` of them, runs one vLLM engine."""

    RULES = (
        Rule(
            "!has(self.tensorParallel) || self.gpus * self.podsPerEngine % self.tensorParallel == 0",
            "tensorParallel must divide gpus x podsPerEngine: an engine has that many GPUs",
            lambda g: g.tensor_parallel is None or g.gpus * g.pods_per_engine % g.tensor_parallel == 0,
        ),
        Rule(
            "self.replicas % self.podsPerEngine == 0",
            "podsPerEngine must divide replicas, the number of pods",
            lambda g: g.replicas % g.pods_per_engine == 0,
        ),
    )

    tensor_parallel: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Number of GPUs that hold one copy of the model; default: generation.tensorParallel. A pod runs "
        "gpus / tensorParallel copies (data parallel).",
    )
    pods_per_engine: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of pods that run one engine together, on gpus x podsPerEngine GPUs: tensorParallel in each "
        "of gpus x podsPerEngine / tensorParallel pipeline stages. Set it where no node has room for the model.",
    )


class ElasticSpec(Section):
    """Number of engines while the job runs, and its limits."""

    RULES = (
        Rule(
            "self.replicas <= self.maxReplicas",
            "replicas must be at most maxReplicas",
            lambda e: e.replicas <= e.max_replicas,
            lambda e: e.max_replicas,
            "self.maxReplicas",
        ),
        Rule(
            "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas must be at most maxReplicas",
            lambda e: (e.min_replicas or 1) <= e.max_replicas,
            lambda e: e.max_replicas,
            "self.maxReplicas",
        ),
    )

    replicas: int = Field(
        1,
        ge=1,
        le=4096,
        description="Number of engine pods. May change at any time, by an edit, `kubectl scale` or an autoscaler: the "
        "others go on, new engines get weights at the next push, and what a removed one was sampling goes to others.",
    )
    max_replicas: int = Field(
        ge=1,
        le=4096,
        description="Most engine pods that there may be. Set it to the number for which there may ever be GPUs. Can "
        "change only while the job is suspended.",
    )
    min_replicas: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Fewest engine pods. Set it to let the operator itself change `replicas`, between minReplicas and "
        "maxReplicas, to the number with which neither engines nor ranks wait (metric engines/balanced).",
    )


class ServerSpec(Section):
    """vLLM engines on their own pods."""

    RULES = (
        Rule(
            "self.port != self.transferPort", "port and transferPort must differ", lambda s: s.port != s.transfer_port
        ),
        Rule(
            "!has(self.elastic) || self.groups[0].?podsPerEngine.orValue(1) == 1",
            "podsPerEngine of the first group must be 1 with elastic, which counts single pods",
            lambda s: s.elastic is None or s.groups[0].pods_per_engine == 1,
        ),
    )

    groups: Annotated[tuple[GenerationGroup, ...], Field(min_length=1, max_length=32)] = Field(
        description="Groups of engine pods. Groups may differ in GPUs and pod settings.",
        json_schema_extra=list_map("name"),
    )
    elastic: ElasticSpec | None = Field(
        None,
        description="Lets the number of engines change while the job runs: that of the first group, whose own "
        "`replicas` then does not count. Of its pods only the first has to run; where there are other groups, none. "
        "Needs failurePolicy.onGenerationFailure RestartGeneration.",
    )
    port: int = Field(
        8000,
        ge=1024,
        le=65535,
        description="HTTP port of each engine. Change it where it is taken, as with podTemplate.hostNetwork.",
    )
    transfer_port: int = Field(
        29600,
        ge=1024,
        le=65535,
        description="Port on rank 0's pod where rank 0 and the engines meet to transfer weights. Change it where it "
        "is taken, as with podTemplate.hostNetwork.",
    )


class NodeLocalSpec(Section):
    """vLLM engines next to the ranks in each trainer pod.

    The pod's first rank sends them the weights, which never cross nodes.
    """

    RULES = (
        Rule(
            "self.gpusPerNode % self.enginesPerNode == 0",
            "enginesPerNode must divide gpusPerNode",
            lambda n: n.gpus_per_node % n.engines_per_node == 0,
            lambda n: n.gpus_per_node,
            "self.gpusPerNode",
        ),
        Rule(
            "!has(self.devices) || "
            "(size(self.devices) == self.gpusPerNode && self.devices.all(d, self.devices.exists_one(e, e == d)))",
            "devices must name gpusPerNode different devices; leave it out to use the last GPUs of each pod",
            lambda n: n.devices is None or len(set(n.devices)) == len(n.devices) == n.gpus_per_node,
        ),
        Rule(
            "self.port + self.enginesPerNode <= self.transferPort || self.transferPort < self.port",
            "transferPort must lie outside the engines' ports, port to port + enginesPerNode - 1",
            lambda n: not n.port <= n.transfer_port < n.port + n.engines_per_node,
            lambda n: n.port + n.engines_per_node,
            "self.port + self.enginesPerNode",
        ),
    )

    gpus_per_node: int = Field(
        1, ge=1, le=63, description="Number of GPUs of each trainer pod that vLLM uses; ranks use the others."
    )
    engines_per_node: int = Field(
        1,
        ge=1,
        le=63,
        description="Number of engines in each pod (num_infer_workers of ms-swift); they share gpusPerNode GPUs. "
        "Raise it where these hold several copies of the model.",
    )
    devices: Annotated[tuple[Annotated[int, Field(ge=0, le=63)], ...], Field(min_length=1, max_length=63)] | None = (
        Field(
            None,
            description="Indices of the GPUs that vLLM uses in every pod; default: the last gpusPerNode GPUs. Set it "
            "where others are better connected.",
        )
    )
    port: int = Field(
        8000,
        ge=1024,
        le=65000,
        description="HTTP port of a pod's first engine; the next engines use the next ports. Change it where one is "
        "taken, as with podTemplate.hostNetwork.",
    )
    transfer_port: int = Field(
        29600,
        ge=1024,
        le=65535,
        description="Port in each pod where its first rank and its engines meet to transfer weights. Change it where "
        "it is taken, as with podTemplate.hostNetwork.",
    )


def _belongs(member: str, field: str, topology: Topology) -> Rule:
    return Rule(
        f"has(self.{member}) == (self.topology == '{topology}')",
        f"{member} must be set if topology is {topology}, and only then",
        lambda g: (getattr(g, field) is not None) == (g.topology is topology),
    )


class GenerationSpec(GenerationConfig):
    """Engine that generates completions, and its place."""

    RULES = (
        _belongs("server", "server", Topology.SERVER),
        _belongs("nodeLocal", "node_local", Topology.NODE_LOCAL),
        Rule(
            "!has(self.colocate) || self.topology == 'Colocate'",
            "colocate may be set only if topology is Colocate",
            lambda g: g.colocate is None or g.topology is Topology.COLOCATE,
        ),
        Rule(
            "self.engine == 'vLLM' || (self.topology == 'Colocate' && self.tensorParallel == 1)",
            "engine Transformers works only with topology Colocate and tensorParallel 1; use vLLM otherwise",
            lambda g: g.engine == "vLLM" or (g.topology is Topology.COLOCATE and g.tensor_parallel == 1),
        ),
        Rule(
            "self.engine == 'vLLM' || !(has(self.kvCacheMemory) || has(self.gpuMemoryUtilization) || "
            "has(self.engineArgs) || has(self.colocate))",
            "engine Transformers has none of vLLM's settings: remove kvCacheMemory, gpuMemoryUtilization, engineArgs "
            "and colocate, or use vLLM",
            lambda g: (
                g.engine == "vLLM"
                or not (g.kv_cache_memory or g.gpu_memory_utilization or g.engine_args or g.colocate is not None)
            ),
        ),
        Rule(
            "!has(self.server) || self.server.groups.all(g, "
            "has(g.tensorParallel) || g.gpus * g.podsPerEngine % self.tensorParallel == 0)",
            "tensorParallel must divide gpus x podsPerEngine of every group of server.groups that does not set its own",
            lambda g: (
                g.server is None
                or all(
                    x.tensor_parallel or x.gpus * x.pods_per_engine % g.tensor_parallel == 0 for x in g.server.groups
                )
            ),
        ),
        Rule(
            "!has(self.nodeLocal) || self.nodeLocal.gpusPerNode == self.nodeLocal.enginesPerNode * self.tensorParallel",
            "nodeLocal.gpusPerNode must be nodeLocal.enginesPerNode x tensorParallel: each engine uses "
            "tensorParallel GPUs",
            lambda g: (
                g.node_local is None or g.node_local.gpus_per_node == g.node_local.engines_per_node * g.tensor_parallel
            ),
            lambda g: g.node_local.engines_per_node * g.tensor_parallel,
            "self.nodeLocal.enginesPerNode * self.tensorParallel",
        ),
    )

    server: ServerSpec | None = Field(None, description="Engine pods of the topology Server; required with it.")
    node_local: NodeLocalSpec | None = Field(
        None, description="GPUs and engines in each pod of the topology NodeLocal; required with it."
    )
