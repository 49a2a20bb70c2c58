"""All ranks give an engine the least that any has, and say so where there is nothing."""

import pytest

from grpo_spec.errors import ConfigError
from grpo_workload.policy.trials.engine_room import agree


def test_ranks_agree_on_the_least_room():
    assert agree([30, 20, 25]) == 20
    with pytest.raises(ConfigError, match=r"leaves no memory for vLLM \(1.5 GiB are lacking .*offloadOptimizer"):
        agree([2**30, -3 * 2**29])
