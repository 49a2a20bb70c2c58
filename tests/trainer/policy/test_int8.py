"""With moments in 8 bits, steps are those of bitsandbytes under every ZeRO stage, and losses those of float32.

That such states leave the device, and are saved and loaded: test_step.py; on other ranks: storage/test_reshape.py.
"""

import pytest

FLAT = ("1:float32", "1:bfloat16", "2:bfloat16", "3:bfloat16", "3:float32:lora")  # one tensor for each rank
ONE_BY_ONE = ("0:float32", "0:bfloat16")


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_in_8_bits_are_those_of_bitsandbytes_with_the_same_gradients(run_program, tiny_model, world_size):
    plans = FLAT + ONE_BY_ONE if world_size == 2 else ("0:float32", "2:bfloat16", "3:bfloat16")
    for results in run_program("int8_steps.py", world_size, tiny_model, *plans):
        for plan, result in results.items():
            assert result["equal"], plan
            assert all(result["equal"]), plan
            small = ["torch.float32 torch.float32"] if plan in ONE_BY_ONE else []
            assert result["types"] == [*small, "torch.float32 torch.uint8"], plan
            *first, last = zip(result["float32"], result["int8"], strict=True)
            change = abs(last[0] - first[2][0])  # of the loss on the same samples, in three steps
            assert change > 0.01, plan
            assert all(ours == pytest.approx(whole, abs=0.02 * change) for whole, ours in [*first, last]), plan
