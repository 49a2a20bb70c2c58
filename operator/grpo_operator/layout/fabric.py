"""Environment variables and RDMA devices that a pod needs for the network between nodes. Pure.

Sources: NCCL's user guide, "Environment Variables"; for EFA, the README of the AWS OFI NCCL plugin. Variables that a
user sets in `env` win.
"""

from __future__ import annotations

from grpo_operator.api.infrastructure import NetworkSpec

_FABRICS: dict[str, dict[str, str]] = {
    "Ethernet": {"NCCL_IB_DISABLE": "1"},
    "InfiniBand": {"NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5"},
    # Entry 3 of the address table of NVIDIA's adapters is RoCE version 2, which is routable.
    "RoCE": {"NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5", "NCCL_IB_GID_INDEX": "3"},
    "EFA": {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
}


def fabric_environment(network: NetworkSpec) -> list[dict[str, str]]:
    """Return the container's environment variables for this network."""
    variables = dict(_FABRICS[network.fabric]) if network.fabric else {}
    if network.interface:
        variables |= {"NCCL_SOCKET_IFNAME": network.interface, "GLOO_SOCKET_IFNAME": network.interface}
    return [{"name": name, "value": value} for name, value in variables.items()]


def rdma_resources(network: NetworkSpec) -> dict[str, str]:
    """Return the container's extended resources for this network."""
    return {network.rdma_resource: str(network.rdma_count)} if network.rdma_resource else {}
