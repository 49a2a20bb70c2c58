"""Reward functions of a user, as `module:function` names them: good ones, and each way in which one can fail."""

import asyncio
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress

import numpy as np

NOT_A_FUNCTION = 3
loops = set()


def shorter(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    print("a line that the function prints")  # noqa: T201
    columns |= {"state": [trainer_state.global_step, trainer_state.max_steps]}
    log_metric("tokens", np.float32(len(completion_ids[0])))
    log_metric("tokens", 1)
    log_extra("first", np.array([ids[0] for ids in completion_ids]))
    with open(columns["folder"][0] + "/seen", "w") as file:
        json.dump({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}, file)
    return np.array([-len(ids) for ids in completion_ids], dtype=np.float32)


class Longest:
    """A reward with settings and a state."""

    def __init__(self, limit, scale=1.0):
        if limit < 0:
            raise ValueError("limit must be positive")
        self.limit, self.scale, self.longest = limit, scale, 0

    def __call__(self, completion_ids, **kwargs):
        self.longest = max(self.longest, *map(len, completion_ids))
        return [self.scale * (self.longest <= self.limit)] * len(completion_ids)


def bounded(completion_ids, limit, **kwargs):
    return [float(len(ids) <= limit) for ids in completion_ids]


def logs_too_little(prompts, log_extra, **kwargs):
    log_extra("note", ["one"])


def logs_a_reserved_name(prompts, log_metric, **kwargs):
    log_metric("mean", 1.0)


async def keeps_its_loop(prompts, **kwargs):
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return [len(loops)] * len(prompts)


class Callable:
    async def __call__(self, prompts, completions, **kwargs):
        return [None] * len(prompts)


callable_object = Callable()


def one_short(prompts, **kwargs):
    return [0.0] * (len(prompts) - 1)


def letters(prompts, **kwargs):
    return "1" * len(prompts)


def words(prompts, **kwargs):
    return [0.0] * (len(prompts) - 1) + ["good"]


def at_second(prompts, other, **kwargs):
    loops.add(len(loops))
    return [0.0] * len(prompts) if len(loops) == 1 else globals()[other](prompts)


def of_two(prompts, completions):
    return [0.0] * len(prompts)


def makes_of_two():
    return of_two


def spies_on(prompts, folder, **kwargs):
    return [0.0] * len(prompts)


def draws(prompts, **kwargs):
    return [random.random(), np.random.random()]


def huge(prompts, **kwargs):
    return [0] * (len(prompts) - 1) + [10**400]


def reads_too_far(prompts, **kwargs):
    raise EOFError("the file has ended")


def gives_up_late(prompts, **kwargs):
    return (fails(prompts) for _ in prompts)


async def is_cancelled(prompts, **kwargs):
    raise asyncio.CancelledError


def logs_under_a_tuple(prompts, log_extra, **kwargs):
    log_extra(("a", "b"), prompts)


def infinite(prompts, **kwargs):
    return [float("inf")] * len(prompts)


def divides(prompts, **kwargs):
    return [0.0] * (len(prompts) - 1) + [float("nan")]


def exits(prompts, **kwargs):
    raise SystemExit(0)


def times_out_itself(prompts, **kwargs):
    raise TimeoutError("no answer from the judge")


def hangs(prompts, **kwargs):
    threading.Event().wait()


async def hangs_too(prompts, **kwargs):
    await asyncio.Event().wait()


def backtracks(prompts, **kwargs):
    return [float(bool(re.match("(a+)+$", "a" * 60 + "b")))]


def fails(prompts, **kwargs):
    raise KeyError("colour")


def takes_all(prompts, **kwargs):
    return [float(len(bytearray(400 << 20)))] * len(prompts)


def crashes(prompts, **kwargs):
    ctypes.string_at(0)


def leaves(prompts, **kwargs):
    os._exit(0)


def is_killed(prompts, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def talks_nonsense(prompts, **kwargs):
    for descriptor in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket"):
                os.write(descriptor, b'["no", "reply"]\n')
        except OSError:
            pass
    return [0.0] * len(prompts)


def asks_the_judge(prompts, **kwargs):
    return [float(os.environ["JUDGE_API_KEY"] == "sesame")] * len(prompts)


def names(prompts, folder, **kwargs):
    with open(folder[0] + "/names", "w") as file:
        json.dump(sorted(os.environ), file)
    return [0.0] * len(prompts)


def spies(prompts, **kwargs):
    rank = os.getppid()
    found = 0
    for name in ("environ", "mem", "auxv"):
        with suppress(PermissionError), open(f"/proc/{rank}/{name}", "rb"):
            found += 1
    return [float(found)] * len(prompts)


def starts_others(prompts, folder, **kwargs):
    other = subprocess.Popen(["sleep", "1000"])
    with open(folder[0] + "/pid", "w") as file:
        file.write(str(other.pid))
    time.sleep(1000)


def stuck(prompts, folder, **kwargs):
    with open(folder[0] + "/pid", "w") as file:
        file.write(str(os.getpid()))
    return backtracks(prompts)


def moves(prompts, folder, **kwargs):
    os.makedirs(folder[0] + "/a")
    os.makedirs(folder[0] + "/b")
    open(folder[0] + "/a/file", "w").close()
    os.rename(folder[0] + "/a/file", folder[0] + "/b/file")
    return [float(os.path.exists(folder[0] + "/b/file"))] * len(prompts)


class Game:
    """An environment: what it is asked to add up."""

    def __init__(self, total):
        self.total = total


def reads_games(completions, environments, log_extra, **kwargs):
    log_extra("seen", [turns[-1]["content"] for turns in completions])
    return [None if game is None else game.total for game in environments]
