"""The GPU time of a job as one line. Pure."""

from __future__ import annotations

from grpo_operator.api.usage_status import PARTS, Usage
from grpo_spec.words import counted


def describe_usage(usage: Usage | None, price: tuple[float, str] | None = None) -> str:
    """Return how long the job has held GPUs and what for, empty before it has. `price`: of a GPU hour."""
    held = usage.gpu_seconds.get("held", 0) if usage else 0
    if usage is None or held == 0:
        return ""
    shares = {use: usage.gpu_seconds.get(use, 0) / held for use in PARTS}
    parts = ", ".join(f"{share:.0%} {use}" for use, share in shares.items() if share >= 0.005)
    short = counted(round(held / 60), "GPU minute") if held >= 60 else counted(round(held), "GPU second")
    hours = f"{held / 3600:,.1f} GPU hours" if held >= 3600 else short
    cost = f" for {held / 3600 * price[0]:,.2f} {price[1]}" if price else ""
    return f"{hours}{cost}: {parts}"
