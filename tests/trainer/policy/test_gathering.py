"""Weights that ZeRO-3 keeps in parts are exported whole, with the values of the last step, and stay in parts."""

from grpo_spec.contract import Device
from support.trainer.program_errors import assert_gathered


def test_gathered_weights_equal_the_trained_ones(run_program):
    """Each of 3 ranks takes 3 steps, and exports all weights 10 times after each step."""
    for result in run_program("gathering.py", 3, Device.CPU):
        assert_gathered(result)
