"""The place of this trainer pod among all trainer pods, and the variables of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_spec.contract import ENV_POD_NAME, Engine, Member
from grpo_workload.pod.contract_file import ContractError, ThisPod


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(ThisPod):
    """A trainer pod and its place among the members of the contract.

    Raises ContractError when the pod is not a member, or when the ranks of members overlap or leave gaps.
    """

    def __post_init__(self) -> None:
        expected_offset = 0
        for member in self.contract.members:
            if member.rank_offset != expected_offset:
                raise ContractError(
                    f"members[{member.pod}].rankOffset is {member.rank_offset}, but the members before it have "
                    f"{expected_offset} ranks",
                    self.contract.attempt,
                )
            expected_offset += member.gpus
        names = [member.pod for member in self.contract.members]
        if names.count(self.pod) != 1:
            raise ContractError(
                f"{ENV_POD_NAME} {self.pod!r} must name exactly one member of the contract, which has: "
                f"{', '.join(names)}",
                self.contract.attempt,
            )

    @property
    def group_rank(self) -> int:
        """Position of this pod among all trainer pods: torchrun's node rank."""
        return [member.pod for member in self.contract.members].index(self.pod)

    @property
    def member(self) -> Member:
        """Entry of this pod in the contract."""
        return self.contract.members[self.group_rank]

    @property
    def ranks(self) -> range:
        """Global ranks of this pod."""
        return range(self.member.rank_offset, self.member.rank_offset + self.member.gpus)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines that run in this pod next to its ranks (topology NodeLocal)."""
        return tuple(engine for engine in self.contract.engines if engine.pod == self.pod)

    @property
    def is_master(self) -> bool:
        """Whether rank 0 is in this pod."""
        return self.group_rank == 0

    @property
    def run_dir(self) -> Path:
        """The run's folder, into which rank 0 writes curves. Without durable storage, only the master's pod has it."""
        return self.data_dir / self.contract.job.run

    @property
    def others(self) -> tuple[Member, ...]:
        """All members except this one, in rank order."""
        return tuple(member for member in self.contract.members if member.pod != self.pod)

    def rank_env(self, local_rank: int) -> dict[str, str]:
        """Return the variables of `contract.RANK_ENV` for one rank, as torchrun sets them.

        Adds CUDA_VISIBLE_DEVICES when the ranks' devices are not the first ones of the pod.
        """
        member = self.member
        assert 0 <= local_rank < member.gpus
        are_first = not self.engines and member.devices in ((), tuple(range(member.gpus)))
        devices = {} if are_first else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, member.devices))}
        return devices | {
            "RANK": str(member.rank_offset + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.contract.world_size),
            "LOCAL_WORLD_SIZE": str(member.gpus),
            "GROUP_RANK": str(self.group_rank),
            "MASTER_ADDR": self.contract.master.host,
            "MASTER_PORT": str(self.contract.master_port),
        }
