"""The parts of a policy that the trial at the start uses, without DeepSpeed."""

from types import SimpleNamespace
from typing import Any

from grpo_workload.policy.logprobs.head import LogprobHead


def stand_in_policy(model: Any, head: LogprobHead | None = None, *, shares_prompts: bool = False) -> Any:
    """Return a policy of one rank with this model; `head` wraps its output layer already."""
    return SimpleNamespace(
        module=model,
        head=head or LogprobHead(model),
        device=model.device,
        is_partitioned=False,
        group=None,
        shares_prompts=shares_prompts,
    )
