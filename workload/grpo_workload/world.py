"""Where this pod stands in the world: its member of the contract, found by the pod's name, and the variables of its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from grpo_workload.contract import (
    CONTRACT_PATH,
    DATA_DIR,
    ENV_CONTRACT,
    ENV_DATA_DIR,
    ENV_POD_NAME,
    ENV_POD_UID,
    ENV_STATE_DIR,
    ENV_TERMINATION_LOG,
    STATE_DIR,
    TERMINATION_LOG,
    Contract,
    Engine,
    Member,
)

SUPPORTED_VERSION: int = get_args(Contract.model_fields["contract_version"].annotation)[0]


class ContractError(ValueError):
    """The contract of an epoch cannot be carried out here."""

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One pod's place in the world, and where it keeps its state."""

    contract: Contract
    member: Member
    group_rank: int  # position of the pod among all pods: torchrun's node rank
    pod_uid: str
    state_dir: Path
    termination_log: Path
    data_dir: Path = Path(DATA_DIR)

    @property
    def pod(self) -> str:
        """Name of this pod."""
        return self.member.pod

    @property
    def ranks(self) -> range:
        """Global ranks of this pod."""
        return range(self.member.rank_offset, self.member.rank_offset + self.member.gpus)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines beside this pod's ranks."""
        return tuple(engine for engine in self.contract.engines if engine.pod == self.pod)

    @property
    def is_master(self) -> bool:
        """Whether rank 0 is in this pod."""
        return self.group_rank == 0

    @property
    def run_dir(self) -> Path:
        """The run's folder, where rank 0 leaves its curves; without durable storage it is on the master's pod alone."""
        return self.data_dir / self.contract.job.run

    @property
    def others(self) -> tuple[Member, ...]:
        """All members but this one, in rank order."""
        return tuple(member for member in self.contract.members if member.pod != self.member.pod)

    def rank_env(self, local_rank: int) -> dict[str, str]:
        """The variables of `contract.RANK_ENV` for one rank, as torchrun sets them, and the devices where they are not the first ones."""
        assert 0 <= local_rank < self.member.gpus
        named = self.member.devices
        are_first = not self.engines and named in ((), tuple(range(self.member.gpus)))
        devices = {} if are_first else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, named))}
        return devices | {
            "RANK": str(self.member.rank_offset + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.contract.world_size),
            "LOCAL_WORLD_SIZE": str(self.member.gpus),
            "GROUP_RANK": str(self.group_rank),
            "MASTER_ADDR": self.contract.master.host,
            "MASTER_PORT": str(self.contract.master_port),
        }


def read_contract(environ: Mapping[str, str]) -> Contract:
    """The contract that the container's variables lead to.

    Raises ValueError when variables or the contract's file are missing, and ContractError, which is one too, when the contract is of
    another version or invalid.
    """
    missing = [name for name in (ENV_POD_NAME, ENV_POD_UID) if not environ.get(name)]
    path = Path(environ.get(ENV_CONTRACT, CONTRACT_PATH))
    if ENV_CONTRACT not in environ and not path.exists():
        missing.insert(0, ENV_CONTRACT)
    if missing:
        raise ValueError(f"missing variables: {', '.join(missing)}. The operator sets them in a pod; on one machine, `grpo run` does.")
    if not path.is_file():
        raise ValueError(f"{ENV_CONTRACT}: there is no file {path}; it must be the contract that the operator or `grpo run` wrote")
    return parse_contract(path.read_text())


def read_place(environ: Mapping[str, str]) -> Place:
    """The place that the container's variables and the contract file describe; raises as `read_contract`, and when the pod is no member."""
    return find_place(
        read_contract(environ),
        pod_name=environ[ENV_POD_NAME],
        pod_uid=environ[ENV_POD_UID],
        state_dir=Path(environ.get(ENV_STATE_DIR, STATE_DIR)),
        termination_log=Path(environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)),
        data_dir=Path(environ.get(ENV_DATA_DIR, DATA_DIR)),
    )


def parse_contract(text: str) -> Contract:
    """The contract in a JSON text. Raises ContractError when it is of another version, before anything else of it is read, or invalid."""
    raw = json.loads(text)
    version, epoch = raw.get("contractVersion"), raw.get("epoch", 0)
    if version != SUPPORTED_VERSION:
        raise ContractError(
            f"the operator wrote contractVersion {version}, this image reads contractVersion {SUPPORTED_VERSION}: "
            "use an image of the operator's release",
            epoch,
        )
    try:
        return Contract.model_validate(raw)
    except ValidationError as error:
        raise ContractError(f"the contract is invalid: {error}", epoch) from error


def find_place(
    contract: Contract, *, pod_name: str, pod_uid: str, state_dir: Path, termination_log: Path, data_dir: Path = Path(DATA_DIR)
) -> Place:
    """The place of the pod `pod_name`. Raises ContractError when it is no member, or the members' ranks overlap or leave gaps."""
    expected_offset = 0
    for member in contract.members:
        if member.rank_offset != expected_offset:
            raise ContractError(
                f"members[{member.pod}].rankOffset is {member.rank_offset}, but the members before it have {expected_offset} ranks",
                contract.epoch,
            )
        expected_offset += member.gpus
    positions = [index for index, member in enumerate(contract.members) if member.pod == pod_name]
    if len(positions) != 1:
        names = ", ".join(member.pod for member in contract.members)
        raise ContractError(f"{ENV_POD_NAME} {pod_name!r} must name exactly one member of the contract, which has: {names}", contract.epoch)
    return Place(
        contract=contract,
        member=contract.members[positions[0]],
        group_rank=positions[0],
        pod_uid=pod_uid,
        state_dir=state_dir,
        termination_log=termination_log,
        data_dir=data_dir,
    )
