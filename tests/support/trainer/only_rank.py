"""A world of one rank."""

from __future__ import annotations

from grpo_cli.local.processes import free_ports


def only_rank() -> dict[str, str]:
    """Return the variables of the only rank of a world, with a port of its own."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return place | {"MASTER_PORT": str(free_ports(1)[0])}
