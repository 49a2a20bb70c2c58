"""The ranks and engines of a job as a table, for `grpo render`. Pure."""

from __future__ import annotations

from typing import NamedTuple

from grpo_spec.contract import Contract


class Row(NamedTuple):
    """One rank, or one engine."""

    role: str
    rank: str  # global rank of the training; empty for an engine
    pod: str
    group: str
    devices: str  # local devices of the pod
    note: str


def rows(contract: Contract) -> list[Row]:
    """Return every rank in order, then every engine."""
    listed = []
    senders = {transfer.sender for transfer in contract.transfers}
    tensor_parallel = contract.config.generation.tensor_parallel
    for member in contract.members:
        for local, device in enumerate(member.devices):
            rank = member.rank_offset + local
            notes = ["master"] if rank == 0 else []
            if rank in senders:
                notes.append("sends weights")
            if not contract.engines and contract.config.generation.engine == "vLLM":
                notes.append(f"vLLM {rank // tensor_parallel}, TP rank {rank % tensor_parallel}")
            listed.append(Row("trainer", str(rank), member.pod, member.group, str(device), ", ".join(notes)))
    for engine in contract.engines:
        shape = f"TP {engine.tensor_parallel}" + (f", DP {engine.data_parallel}" if engine.data_parallel > 1 else "")
        if engine.followers:
            shape += f", PP {engine.pipeline_parallel} over {len(engine.pods)} pods"
        sender = contract.transfers[engine.transfer].sender
        devices = ",".join(map(str, engine.devices))
        listed.append(
            Row(
                "engine",
                "",
                engine.name,
                engine.group,
                devices,
                f"{shape}, port {engine.port}, weights from rank {sender}{', elastic' if engine.elastic else ''}",
            )
        )
        listed += [
            Row("engine", "", one.pod, engine.group, devices, f"part of {engine.name}") for one in engine.followers
        ]
    return listed


def table(contract: Contract) -> str:
    """Return the rows as text with aligned columns."""
    header = Row("ROLE", "RANK", "POD", "GROUP", "DEVICE", "NOTE")
    lines = [header, *rows(contract)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
