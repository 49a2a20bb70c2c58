"""Asserts what is said of users' code that hangs: its own function first, then where it is deepest."""

import selectors

from grpo_workload.environments.endings import last_stack


def test_the_innermost_frames_of_a_deep_stack_are_kept_below_the_users_function():
    ours = '  File "/x/grpo_workload/environments/user_worker.py", line 1 in call\n'
    deep = "".join(f'  File "/lib/net.py", line {depth} in wait\n' for depth in range(20))
    dump = f'Current thread 0x1 (most recent call first):\n{deep}  File "/data/rewards.py", line 7 in judge\n{ours}'
    first, *below = last_stack(dump.encode()).splitlines()
    assert first == "; it was in judge (/data/rewards.py:7)"
    assert [line.split()[3] for line in below] == [str(depth) for depth in range(8)]
    assert last_stack(ours.encode()) == ""


def test_nothing_is_said_of_a_coroutine_that_waits_which_is_on_no_stack():
    files = (selectors.__file__, "/lib/asyncio/base_events.py", "/x/grpo_workload/rewards/worker.py", "<string>")
    dump = "Current thread 0x1 (most recent call first):\n" + "".join(f'  File "{one}", line 1 in f\n' for one in files)
    assert last_stack(dump.encode()) == ""
