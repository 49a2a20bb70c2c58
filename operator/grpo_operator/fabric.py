"""What the fabric between nodes asks of a pod: NCCL's variables and RDMA devices. Pure.

Variables: NCCL's user guide, "Environment Variables"; for EFA, the AWS OFI NCCL plugin's README. Whatever a user sets in `env` wins.
"""

from __future__ import annotations

from grpo_operator.api import NetworkSpec

_FABRICS: dict[str, dict[str, str]] = {
    "Ethernet": {"NCCL_IB_DISABLE": "1"},
    "InfiniBand": {"NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5"},
    # Version 2 of RoCE, the routable one, is the entry 3 of the table of addresses on NVIDIA's adapters.
    "RoCE": {"NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5", "NCCL_IB_GID_INDEX": "3"},
    "EFA": {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
}


def fabric_environment(network: NetworkSpec) -> list[dict[str, str]]:
    """Variables for the container."""
    variables = dict(_FABRICS[network.fabric]) if network.fabric else {}
    if network.interface:
        variables |= {"NCCL_SOCKET_IFNAME": network.interface, "GLOO_SOCKET_IFNAME": network.interface}
    return [{"name": name, "value": value} for name, value in variables.items()]


def rdma_resources(network: NetworkSpec) -> dict[str, str]:
    """Extended resources for the container."""
    return {network.rdma_resource: str(network.rdma_count)} if network.rdma_resource else {}
