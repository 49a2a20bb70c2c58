"""`spec.generation`: who samples completions, and on which GPUs of which pods."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_operator.podtemplate import PodGroup, list_map
from grpo_workload.config import GenerationConfig, Topology
from grpo_workload.section import Rule, Section


class GenerationGroup(PodGroup):
    """Generation pods of one kind, one vLLM engine on each."""

    RULES = (
        Rule(
            "!has(self.tensorParallel) || self.gpus % self.tensorParallel == 0",
            "tensorParallel must divide gpus: the GPUs left over hold further copies of the model, and an engine cannot span pods",
            lambda g: g.tensor_parallel is None or g.gpus % g.tensor_parallel == 0,
        ),
    )

    tensor_parallel: int | None = Field(
        None, ge=1, le=64, description="GPUs of one copy of the model; generation.tensorParallel when not set. The rest is data parallel."
    )


class ServerSpec(Section):
    """vLLM on pods of its own."""

    RULES = (Rule("self.port != self.transferPort", "port and transferPort must differ", lambda s: s.port != s.transfer_port),)

    groups: Annotated[tuple[GenerationGroup, ...], Field(min_length=1, max_length=32)] = Field(
        description="Groups of engines, which may differ in GPUs.", json_schema_extra=list_map("name")
    )
    port: int = Field(8000, ge=1024, le=65535, description="Port of each engine.")
    transfer_port: int = Field(29600, ge=1024, le=65535, description="Port on rank 0's pod at which weights are handed over.")


class NodeLocalSpec(Section):
    """vLLM beside the ranks of each trainer pod, fed by the pod's first rank: weights never cross nodes."""

    RULES = (
        Rule(
            "self.gpusPerNode % self.enginesPerNode == 0",
            "enginesPerNode must divide gpusPerNode",
            lambda n: n.gpus_per_node % n.engines_per_node == 0,
            lambda n: n.gpus_per_node,
            "self.gpusPerNode",
        ),
        Rule(
            "!has(self.devices) || (size(self.devices) == self.gpusPerNode && self.devices.all(d, self.devices.exists_one(e, e == d)))",
            "devices must name gpusPerNode different devices; leave it out to take the last ones of each pod",
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

    gpus_per_node: int = Field(1, ge=1, le=63, description="GPUs of each trainer pod that are left to vLLM.")
    engines_per_node: int = Field(1, ge=1, le=63, description="Engines on each pod (ms-swift's num_infer_workers); they share gpusPerNode.")
    devices: Annotated[tuple[Annotated[int, Field(ge=0, le=63)], ...], Field(min_length=1, max_length=63)] | None = Field(
        None, description="Local devices for vLLM, the same on every pod; the last ones when not set."
    )
    port: int = Field(8000, ge=1024, le=65000, description="Port of a pod's first engine; the others follow.")
    transfer_port: int = Field(29600, ge=1024, le=65535, description="Port at which a pod's first rank hands weights over.")


def _belongs(member: str, field: str, topology: Topology) -> Rule:
    return Rule(
        f"has(self.{member}) == (self.topology == '{topology}')",
        f"{member} must be set when topology is {topology}, and only then",
        lambda g: (getattr(g, field) is not None) == (g.topology is topology),
    )


class GenerationSpec(GenerationConfig):
    """Who samples completions, and where."""

    RULES = (
        _belongs("server", "server", Topology.SERVER),
        _belongs("nodeLocal", "node_local", Topology.NODE_LOCAL),
        Rule(
            "!has(self.colocate) || self.topology == 'Colocate'",
            "colocate must be set only when topology is Colocate",
            lambda g: g.colocate is None or g.topology is Topology.COLOCATE,
        ),
        Rule(
            "self.engine == 'vLLM' || (self.topology == 'Colocate' && self.tensorParallel == 1)",
            "engine Transformers works with topology Colocate and tensorParallel 1 alone; use vLLM",
            lambda g: g.engine == "vLLM" or (g.topology is Topology.COLOCATE and g.tensor_parallel == 1),
        ),
        Rule(
            "!has(self.server) || self.server.groups.all(g, has(g.tensorParallel) || g.gpus % self.tensorParallel == 0)",
            "tensorParallel must divide gpus of every group of server.groups, or the group must set its own: an engine cannot span pods",
            lambda g: g.server is None or all(x.tensor_parallel or x.gpus % g.tensor_parallel == 0 for x in g.server.groups),
        ),
        Rule(
            "!has(self.nodeLocal) || self.nodeLocal.gpusPerNode == self.nodeLocal.enginesPerNode * self.tensorParallel",
            "nodeLocal.gpusPerNode must be nodeLocal.enginesPerNode x tensorParallel: an engine takes tensorParallel GPUs",
            lambda g: g.node_local is None or g.node_local.gpus_per_node == g.node_local.engines_per_node * g.tensor_parallel,
            lambda g: g.node_local.engines_per_node * g.tensor_parallel,
            "self.nodeLocal.enginesPerNode * self.tensorParallel",
        ),
    )

    server: ServerSpec | None = Field(None, description="Settings of the topology Server.")
    node_local: NodeLocalSpec | None = Field(None, description="Settings of the topology NodeLocal.")
