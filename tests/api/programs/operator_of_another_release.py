"""The operator of another release: pods of its jobs differ from ours, and it does not know the rules of `network`."""

from typing import Any

from grpo_operator.__main__ import main
from grpo_operator.api.infrastructure import NetworkSpec
from grpo_operator.layout import manifests

ours = manifests.pod_template


def theirs(*arguments: Any) -> Any:
    """Return a pod template with another variable, another probe and another grace period."""
    template = ours(*arguments)
    (container,) = template["spec"]["containers"]
    container["env"].insert(0, {"name": "OF_ANOTHER_RELEASE", "value": "1"})
    container["readinessProbe"]["periodSeconds"] = 7
    template["spec"]["terminationGracePeriodSeconds"] = 77
    return template


manifests.pod_template = theirs
NetworkSpec.RULES = ()
main()
