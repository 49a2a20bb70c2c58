"""The contract between the operator and the pods: one JSON file, a few variables, exit codes, and what comes back.

The operator writes a `Contract` into an immutable ConfigMap; every launcher of the job reads it and finds its place by its pod's
name. Back come an `Outcome` (the container's termination message) and `Progress` (served over HTTP by every launcher).
Torch-free: with `grpo_workload.config`, all of the workload that the operator may import.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Literal

from pydantic import Field

from grpo_workload.config import TrainerConfig
from grpo_workload.section import Section

CONTRACT_PATH = "/etc/grpo/contract.json"
STATE_DIR = "/var/run/grpo"
DATA_DIR = "/data"
CACHE_DIR = "/cache"
TERMINATION_LOG = "/dev/termination-log"

MASTER_PORT = 29500
STATUS_PORT = 29501

# Variables the operator sets on the container. `grpo run` sets the same ones on its local processes.
ENV_CONTRACT = "GRPO_CONTRACT"
ENV_STATE_DIR = "GRPO_STATE_DIR"
ENV_DATA_DIR = "GRPO_DATA_DIR"
ENV_TERMINATION_LOG = "GRPO_TERMINATION_LOG"
ENV_POD_NAME = "POD_NAME"
ENV_POD_UID = "POD_UID"
# Variables the launcher sets on each rank: torchrun's own names, so that torch, accelerate, DeepSpeed and vLLM all find them.
RANK_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

RESERVED_ENV = frozenset(
    {ENV_CONTRACT, ENV_STATE_DIR, ENV_DATA_DIR, ENV_TERMINATION_LOG, ENV_POD_NAME, ENV_POD_UID, *RANK_ENV}
    | {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "CUDA_VISIBLE_DEVICES"}
)


class ExitCode(IntEnum):
    """How a launcher ended. sysexits.h where it has a word for it; 1 and 2 are left to crashes of Python itself."""

    DONE = 0
    CONFIG_ERROR = 64
    PEER_LOST = 69
    RANK_FAILED = 70
    STOPPED = 75


class Device(StrEnum):
    """What ranks compute on: NCCL on cuda, gloo on cpu."""

    CUDA = "cuda"
    CPU = "cpu"


class Member(Section):
    """One trainer pod of the world, in rank order."""

    pod: str
    group: str
    host: str = Field(description="DNS name (or address) under which its peers reach it.")
    status_port: int = Field(STATUS_PORT, ge=1, le=65535, description="Port of the launcher's HTTP server.")
    gpus: int = Field(ge=1, description="Ranks of this pod: one a GPU.")
    rank_offset: int = Field(ge=0, description="Global rank of its first local rank.")
    devices: tuple[int, ...] = Field((), description="Local devices of its ranks, in their order; 0, 1, ... when empty.")


class Engine(Section):
    """One vLLM server: on a pod of its own (Server), or beside a trainer pod's ranks (NodeLocal)."""

    name: str = Field(description="Unique in the job: the pod's name, with /<index> where a pod has several.")
    pod: str
    group: str
    host: str
    port: int = Field(ge=1, le=65535, description="Port of its HTTP server.")
    tensor_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    devices: tuple[int, ...] = Field(description="Local devices of its pod that it runs on.")
    transfer: int = Field(0, ge=0, description="Index of the transfer group that feeds it.")
    rank_offset: int = Field(ge=1, description="Rank of its first worker in that group: 1 + the workers of the engines before it.")

    @property
    def world_size(self) -> int:
        """Workers of the engine."""
        return self.tensor_parallel * self.data_parallel


class TransferGroup(Section):
    """One process group for weights: a trainer rank, which sends, and the workers of all engines it feeds."""

    sender: int = Field(ge=0, description="Global rank that is rank 0 of the group.")
    host: str = Field(description="Where the sender listens.")
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2, description="1 + the workers of its engines.")


class JobRef(Section):
    """Which job this is."""

    namespace: str
    name: str
    uid: str

    @property
    def run(self) -> str:
        """Folder of the job's run below the storage: unique for all time, since UIDs are."""
        return f"{self.namespace}/{self.name}/{self.uid}"


class Contract(Section):
    """Everything a pod must know about the job, the same bytes in every pod of an epoch."""

    contract_version: Literal[1] = 1
    job: JobRef
    epoch: int = Field(ge=0)
    device: Device
    members: tuple[Member, ...] = Field(min_length=1)
    engines: tuple[Engine, ...] = Field((), description="Empty for Colocate.")
    transfers: tuple[TransferGroup, ...] = Field((), description="One over all engines (Server), one a node (NodeLocal).")
    master_port: int = Field(MASTER_PORT, ge=1, le=65535)
    timeout_seconds: int = Field(600, ge=1, description="Deadline of the rendezvous gate and of collectives.")
    restart_engines: bool = Field(
        False, description="Whether an engine that is lost comes back (failurePolicy RestartGeneration): ranks wait for it and do not fail."
    )
    durable: bool = Field(description="Whether the data folder outlives the pod (a claim is mounted).")
    config: TrainerConfig

    @property
    def world_size(self) -> int:
        """Ranks over all members."""
        return sum(member.gpus for member in self.members)

    @property
    def master(self) -> Member:
        """The member that holds rank 0."""
        return self.members[0]


class Progress(Section):
    """Where the training is; rank 0 writes it at every step, each launcher serves it as GET /progress with the phases of its own ranks."""

    step: int = 0
    total_steps: int = 0
    phase: str = Field("Starting", description="Starting, WaitingForPeers, then rank 0's: see `grpo_workload.report`.")
    age_seconds: float = Field(0.0, description="Seconds since the last step was finished, filled in by the server.")
    step_seconds: float | None = Field(None, description="Median of the last steps' durations, saving included; None before the first.")
    rank_phases: dict[str, str] = Field(
        default_factory=dict, description="By global rank of this pod, filled in by the server: `Generating for 1830 s`."
    )
    waiting_for: tuple[str, ...] = Field((), description="Pods the gate has not reached, each with the reason.")
    reward: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict, description="The last step's metrics under TRL's names.")
    tokens_per_second: float | None = None
    weight_version: int | None = None
    checkpoint_step: int | None = None
    checkpoint: str | None = Field(None, description="Folder of the newest checkpoint below the data folder.")


class Outcome(Section):
    """How the launcher of a pod ended, as its termination message (at most 4096 bytes, cut by `to_message`)."""

    epoch: int
    pod_uid: str = ""
    exit_code: ExitCode
    reason: str = Field(description="CamelCase word for the condition, for example RankFailed.")
    message: str = Field(description="Who failed, what is wrong, what to do.")
    rank: int | None = None
    progress: Progress | None = None

    def to_message(self) -> str:
        """JSON of at most 4096 bytes, Kubernetes' limit for a termination message; the message is cut in the middle."""
        outcome = self
        keep = len(self.message)
        while len((text := outcome.model_dump_json(by_alias=True, exclude_none=True)).encode()) > 4096:
            keep = keep * 3 // 4
            message = f"{self.message[: keep // 2]} [...] {self.message[len(self.message) - keep // 2 :]}"
            outcome = self.model_copy(update={"message": message, "progress": None})
        return text
