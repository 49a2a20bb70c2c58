"""The contract between the operator and the pods: a JSON file and variables. What comes back is in `reports`.

The operator writes a `Contract` into an immutable ConfigMap. Every launcher of the job reads it and finds its own entry
by its pod's name; a download pod gets `Downloads` as its argument. Torch-free: the operator imports it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from grpo_spec.environments import EnvironmentConfig, ToolConfig
from grpo_spec.generation import Topology
from grpo_spec.schema import Section
from grpo_spec.trainer import TrainerConfig

CONTRACT_PATH = "/etc/grpo/contract.json"
STATE_DIR = "/var/run/grpo"
DATA_DIR = "/data"
CACHE_DIR = "/cache"
TERMINATION_LOG = "/dev/termination-log"

MASTER_PORT = 29500
STATUS_PORT = 29501
ENVIRONMENT_PORT = 29502
"""Port of environment pods. No field: the network of their node is not theirs, so nothing else takes it."""

# Variables that the operator sets on the container. `grpo run` sets the same ones on its local processes.
ENV_CONTRACT = "GRPO_CONTRACT"
ENV_STATE_DIR = "GRPO_STATE_DIR"
ENV_DATA_DIR = "GRPO_DATA_DIR"
ENV_TERMINATION_LOG = "GRPO_TERMINATION_LOG"
ENV_POD_NAME = "POD_NAME"
ENV_POD_UID = "POD_UID"
# Variables that the launcher sets on each rank: torchrun's names, which torch, accelerate, DeepSpeed and vLLM read.
RANK_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

# Variables that a job's pod template must not set. torchrun reads the ones that begin with PET_.
RESERVED_ENV = frozenset({ENV_POD_NAME, ENV_POD_UID, *RANK_ENV, "CUDA_VISIBLE_DEVICES"})
RESERVED_PREFIXES = ("GRPO_", "PET_")


def is_reserved(variable: str) -> bool:
    """Whether a job's pod template must not set this variable."""
    return variable in RESERVED_ENV or variable.startswith(RESERVED_PREFIXES)


class Device(StrEnum):
    """The kind of device that ranks compute on: NCCL on cuda, gloo on cpu."""

    CUDA = "cuda"
    CPU = "cpu"


class Member(Section):
    """One trainer pod. A contract lists its members in rank order."""

    pod: str
    group: str
    host: str = Field(description="DNS name or address at which its peers reach it.")
    status_port: int = Field(STATUS_PORT, ge=1, le=65535, description="Port of the launcher's HTTP server.")
    gpus: int = Field(ge=1, description="Number of ranks in this pod, one per GPU.")
    rank_offset: int = Field(ge=0, description="Global rank of its first local rank.")
    devices: tuple[int, ...] = Field((), description="Local device of each rank, in rank order; 0, 1, ... when empty.")


class Follower(Section):
    """One of the other pods of an engine over several pods: it has workers, and no server."""

    pod: str
    port: int = Field(ge=1, le=65535, description="Port on which it says whether its workers are ready.")


class Engine(Section):
    """One vLLM server: in its own pods (Server), or in a trainer pod next to its ranks (NodeLocal)."""

    name: str = Field(description="Unique in the job: the pod's name, followed by /<index> in pods with several.")
    pod: str = Field(description="Its pod; of several the first, which leads the others.")
    group: str
    host: str
    port: int = Field(ge=1, le=65535, description="Port of its HTTP server.")
    followers: tuple[Follower, ...] = Field((), description="Its other pods, in the order of their workers' ranks.")
    meeting_port: int = Field(MASTER_PORT, ge=1, le=65535, description="Port of its first pod, where the others meet.")
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    devices: tuple[int, ...] = Field(description="Local devices of its pod, or of each of them, on which it runs.")
    transfer: int = Field(0, ge=0, description="Index of the transfer group that sends it weights.")
    elastic: bool = Field(
        False,
        description="Whether it joins and leaves while the attempt runs. Its pod may not exist, and ranks wait for "
        "others only.",
    )

    @property
    def world_size(self) -> int:
        """Number of workers of the engine."""
        return self.copy_size * self.data_parallel

    @property
    def copy_size(self) -> int:
        """Number of workers that hold one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def pods(self) -> tuple[str, ...]:
        """Names of its pods, the first of which leads the others."""
        return (self.pod, *(one.pod for one in self.followers))


class TransferGroup(Section):
    """One process group for weights: the trainer rank that sends them, and the workers of all engines that get them.

    The sender is rank 0; the workers follow, engine by engine in the contract's order, of those that are there.
    """

    sender: int = Field(ge=0, description="Global rank of the sender, which is rank 0 of the group.")
    host: str = Field(description="Host on which the sender listens.")
    port: int = Field(ge=1, le=65535)


class EnvironmentGroup(Section):
    """Environment pods of one kind. They are there before an attempt, and outlive it; any may be away."""

    name: str
    sessions: int = Field(ge=1, description="Most sessions that are open at a time on one pod.")
    environments: tuple[str, ...] = Field((), description="Names of the job's environments that it serves.")
    addresses: tuple[str, ...] = Field(min_length=1, description="host:port of each of its pods.")


class JobRef(Section):
    """Identity of the job."""

    namespace: str
    name: str
    uid: str

    @property
    def run(self) -> str:
        """Folder of the job's run on the storage. Never used again by another job, because it contains the UID."""
        return f"{self.namespace}/{self.name}/{self.uid}"


class EnvironmentPodContract(Section):
    """Everything that an environment pod is told: its file is at `CONTRACT_PATH`, and does not change with attempts."""

    job: JobRef
    group: str
    port: int = Field(ENVIRONMENT_PORT, ge=1, le=65535)
    sessions: int = Field(ge=1, description="Most sessions that are open at a time on this pod.")
    is_local: bool = Field(False, description="Ranks are on this machine, and not only what the pod itself runs.")
    tools: tuple[ToolConfig, ...] = Field((), description="All tools of the job.")
    environments: tuple[EnvironmentConfig, ...] = Field((), description="The environments that this group serves.")


class Contract(Section):
    """Everything that a pod must know about the job. All pods of an attempt read the same bytes."""

    contract_version: Literal[1] = 1
    job: JobRef
    attempt: int = Field(ge=0)
    device: Device
    members: tuple[Member, ...] = Field(min_length=1)
    engines: tuple[Engine, ...] = Field((), description="Empty for Colocate.")
    transfers: tuple[TransferGroup, ...] = Field(
        (), description="One group over all engines (Server), or one per trainer pod (NodeLocal)."
    )
    environment_pods: tuple[EnvironmentGroup, ...] = Field(
        (), description="Pods of tools and environments. Empty: they run in processes beside each rank."
    )
    master_port: int = Field(MASTER_PORT, ge=1, le=65535)
    timeout_seconds: int = Field(600, ge=1, description="Deadline of the rendezvous and of collectives.")
    restart_engines: bool = Field(
        False,
        description="Whether the operator replaces a lost engine (failurePolicy RestartGeneration). If so, ranks wait "
        "for it and do not fail.",
    )
    micro_batch_halvings: int = Field(
        0, ge=0, description="How often to halve the size of micro-batches that ranks choose; set ones are halved."
    )
    durable: bool = Field(description="Whether the data folder outlives the pod (a PersistentVolumeClaim is mounted).")
    config: TrainerConfig

    @property
    def world_size(self) -> int:
        """Number of ranks of all members."""
        return sum(member.gpus for member in self.members)

    @property
    def sequence_groups(self) -> int:
        """Number of groups of ranks that train on the same sequences: that of ranks, unless several share them."""
        return self.world_size // self.config.parallelism.sequence

    @property
    def master(self) -> Member:
        """The member that runs rank 0."""
        return self.members[0]

    def engines_of(self, rank: int) -> list[Engine]:
        """Return the engines that a rank generates on: all of them, or with NodeLocal those of its pod."""
        if self.config.generation.topology is not Topology.NODE_LOCAL:
            return list(self.engines)
        pod = next(one.pod for one in self.members if one.rank_offset <= rank < one.rank_offset + one.gpus)
        return [engine for engine in self.engines if engine.pod == pod]


class DatasetName(Section):
    """A dataset of the hub."""

    name: str
    config: str | None = None
    revision: str | None = None
    split: str


class Downloads(Section):
    """The content that a download pod puts into the cache: its only argument, as JSON."""

    model: str | None = Field(None, description="Model of the hub.")
    revision: str | None = None
    datasets: tuple[DatasetName, ...] = ()
    status_port: int = Field(STATUS_PORT, ge=1, le=65535)
    contract: Contract | None = Field(None, description="The job, if it is planned first whether it fits.")
    gpu_bytes: int | None = Field(None, description="Memory of the smallest GPU of its trainer pods, for that plan.")
