"""Reads the contract that the operator gave this pod, and refuses one that this image cannot carry out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

from pydantic import ValidationError

from grpo_spec.contract import (
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
)
from grpo_spec.schema import WITHOUT_RULES

POLL_SECONDS = 1.0
"""Seconds between two looks whether the contract's file is another one."""

SUPPORTED_VERSION: int = get_args(Contract.model_fields["contract_version"].annotation)[0]


class ContractError(ValueError):
    """The contract of an attempt cannot be carried out by this pod."""

    def __init__(self, message: str, attempt: int) -> None:
        super().__init__(message)
        self.attempt = attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisPod:
    """The pod of this process, as its contract and the container's variables describe it. Base of both roles."""

    contract: Contract
    pod: str  # its name
    pod_uid: str
    state_dir: Path
    termination_log: Path
    data_dir: Path = Path(DATA_DIR)
    contract_path: Path = Path(CONTRACT_PATH)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Return the pod that the container's variables describe.

        Raises ValueError when variables or the contract's file are missing, and its subclass ContractError when the
        contract has another version, is invalid, or does not fit this pod.
        """
        return cls(
            contract=_read_contract(environ),
            pod=environ[ENV_POD_NAME],
            pod_uid=environ[ENV_POD_UID],
            state_dir=Path(environ.get(ENV_STATE_DIR, STATE_DIR)),
            termination_log=Path(environ.get(ENV_TERMINATION_LOG, TERMINATION_LOG)),
            data_dir=Path(environ.get(ENV_DATA_DIR, DATA_DIR)),
            contract_path=Path(environ.get(ENV_CONTRACT, CONTRACT_PATH)),
        )

    async def newer_contract(self) -> None:
        """Wait until the contract's file is that of a later attempt: the operator begins it in this same pod."""
        seen = None
        while True:
            try:
                file = self.contract_path.stat()
                if (version := (file.st_ino, file.st_mtime_ns)) != seen:
                    if json.loads(self.contract_path.read_text()).get("attempt", 0) > self.contract.attempt:
                        return
                    seen = version
            except FileNotFoundError:
                seen = None  # the kubelet is exchanging the folder
            await asyncio.sleep(POLL_SECONDS)


def _read_contract(environ: Mapping[str, str]) -> Contract:
    missing = [name for name in (ENV_POD_NAME, ENV_POD_UID) if not environ.get(name)]
    path = Path(environ.get(ENV_CONTRACT, CONTRACT_PATH))
    if ENV_CONTRACT not in environ and not path.exists():
        missing.insert(0, ENV_CONTRACT)
    if missing:
        raise ValueError(
            f"missing variables: {', '.join(missing)}. In a pod the operator sets them; on one machine, use `grpo run`."
        )
    if not path.is_file():
        raise ValueError(
            f"{ENV_CONTRACT}: there is no file {path}; it must be the contract that the operator or `grpo run` wrote"
        )
    return parse_contract(path.read_text())


def parse_contract(text: str) -> Contract:
    """Return the contract in a JSON text.

    Raises ContractError when it is invalid or has another version. The version is checked before anything else is read.
    Rules are not checked: the operator did, when the job began.
    """
    raw = json.loads(text)
    version, attempt = raw.get("contractVersion"), raw.get("attempt", 0)
    if version != SUPPORTED_VERSION:
        raise ContractError(
            f"the operator wrote contractVersion {version}, this image reads contractVersion {SUPPORTED_VERSION}: "
            "use an image of the operator's release",
            attempt,
        )
    try:
        return Contract.model_validate(raw, context=WITHOUT_RULES)
    except ValidationError as error:
        raise ContractError(f"the contract is invalid: {error}", attempt) from error
