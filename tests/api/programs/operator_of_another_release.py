"""The operator of another release: pods of its jobs differ from ours, it does not know the rules of `network`, and its
defaults are other values. With the argument `crd` it prints its CRD.
"""

import sys
from typing import Any

from grpo_operator.__main__ import main
from grpo_operator.api.crd import render
from grpo_operator.api.infrastructure import NetworkSpec
from grpo_operator.api.spec import GRPOJobSpec
from grpo_operator.layout import manifests
from grpo_spec.trainer import TrainerConfig
from grpo_spec.training import TrainingConfig

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
TrainingConfig.model_fields["num_generations"].default = 4
GRPOJobSpec.model_fields["image"].default = "example.com/workload:older"
for model in (TrainingConfig, TrainerConfig, GRPOJobSpec):
    model.model_rebuild(force=True)
if sys.argv[1:] == ["crd"]:
    sys.stdout.write(render())
else:
    main()
