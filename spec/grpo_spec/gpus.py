"""Memory of GPUs by name, as CUDA reports it: a little less than the name says. Torch-free: the operator imports it."""

from __future__ import annotations

from collections.abc import Mapping

MEMORY = {
    "h100": 79.1,
    "h200": 139.7,
    "a100-80": 79.1,
    "a100-40": 39.3,
    "b200": 178.3,
    "l4": 22.0,
    "l40s": 44.3,
    "rtx4090": 23.5,
}
"""GiB that a process of CUDA finds on an empty GPU."""
RESERVED = 600 << 20
"""Bytes of a GPU that its driver keeps, and that labels of nodes count."""
PRODUCT_LABEL, MEMORY_LABEL = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"


def gpu_bytes(name: str) -> int:
    """Return the memory of a GPU by its name in `MEMORY`, or of a size such as 80Gi. Raises ValueError for others."""
    if name.lower() in MEMORY:
        return int(MEMORY[name.lower()] * 2**30)
    from grpo_spec.schema import in_bytes  # late: pydantic, which `grpo plan --help` need not load

    return in_bytes(name)


def bytes_of_node(selector: Mapping[str, str]) -> int | None:
    """Return the memory of the GPUs of the nodes that a nodeSelector asks for; None if it does not say.

    By the labels of NVIDIA's GPU feature discovery. Slices of a GPU (MIG) have other labels, and count as unknown.
    """
    if (size := selector.get(MEMORY_LABEL, "")).isdigit():
        return (int(size) << 20) - RESERVED  # the label is in MiB
    product = selector.get(PRODUCT_LABEL, "")
    words = product.lower().split("-")
    if "mig" in words or "shared" in words or (words[-1] == "nvl" and "h100" in words):
        return None
    for name in MEMORY:
        kind, _, size = name.partition("-")
        said = [word for word in words if word.endswith("gb")]
        if kind in words and (not size or f"{size}gb" in words) and (kind != "h100" or said in ([], ["80gb"])):
            return gpu_bytes(name)
    return gpu_bytes("rtx4090") if {"rtx", "4090"} <= set(words) else None
