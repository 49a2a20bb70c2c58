import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grpo_devcluster.progress import wait_until
from grpo_workload.inputs import RewardConfig
from grpo_workload.ranks import describe_error
from grpo_workload.rewards import Reward, RewardError, RewardTable, build_rewards, close_rewards, score
from grpo_workload.tasks import PromptSource
from grpo_workload.types import Completion, Prompt

USER_CODE = """
import asyncio, ctypes, json, os, re, signal, subprocess, sys, threading, time

import numpy as np

NOT_A_FUNCTION = 3
loops = set()


def shorter(prompts, completions, completion_ids, **columns):
    print("a line of the function's own")
    with open(columns["folder"][0] + "/seen", "w") as file:
        json.dump({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}, file)
    return np.array([-len(ids) for ids in completion_ids], dtype=np.float32)


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


def not_a_list(prompts, **kwargs):
    return 1.0


def words(prompts, **kwargs):
    return ["good"] * len(prompts)


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
                os.write(descriptor, b'["no", "reply"]\\n')
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
        try:
            found += bool(open(f"/proc/{rank}/{name}", "rb"))
        except PermissionError:
            pass
    return [float(found)] * len(prompts)


def starts_others(prompts, folder, **kwargs):
    other = subprocess.Popen(["sleep", "1000"])
    with open(folder[0] + "/pid", "w") as file:
        file.write(str(other.pid))
    time.sleep(1000)


def moves(prompts, folder, **kwargs):
    os.makedirs(folder[0] + "/a"), os.makedirs(folder[0] + "/b")
    open(folder[0] + "/a/file", "w").close()
    os.rename(folder[0] + "/a/file", folder[0] + "/b/file")
    return [float(os.path.exists(folder[0] + "/b/file"))] * len(prompts)
"""


LOCKED = """
import asyncio, re
from grpo_workload import rewards
from grpo_workload.types import Completion, Prompt

def backtracks(prompts, completions):  # what reasoning-gym's scorers may come to
    return [float(bool(re.match("(a+)+$", "a" * 60 + "b")))]

rewards.LOCK_GRACE = 0.2
prompt = Prompt(index=0, text="", token_ids=(1,))
completion = Completion(token_ids=(1,), logprobs=(0.0,), text="", finish_reason="stop", weight_version=0)
reward = rewards.Reward(name="slow", weight=1, function=backtracks, timeout_seconds=0.2)
asyncio.run(rewards.score([reward], [prompt], [completion]))
"""


# As in a container, without capabilities: root may read whatever it likes.
UNPRIVILEGED = """
import ctypes, subprocess, sys
from grpo_workload.inputs import RewardConfig
from grpo_workload.reward_process import RewardProcess

libc = ctypes.CDLL(None)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
folder = sys.argv[1]
sys.path.insert(0, folder)
control = f"import sys; sys.path.insert(0, {folder!r}); import my_rewards; print('a child without limits:', my_rewards.spies(['']))"
subprocess.run([sys.executable, "-c", control], check=True)
for name in ("spies", "moves"):
    process = RewardProcess(RewardConfig(name="spy", function="my_rewards:" + name), {})
    process.ready()
    print(name + ":", process.call({"prompts": [""], "completions": [""], "folder": [folder]}, 60), flush=True)
    process.close()
"""

RANK = """
import asyncio, sys
from grpo_workload.inputs import RewardConfig
from grpo_workload.reward_process import RewardProcess

folder = sys.argv[1]
with open(folder + "/stuck_rewards.py", "w") as file:
    file.write("import os, re\\ndef stuck(prompts, **kwargs):\\n")
    file.write(f"  open({folder + '/pid'!r}, 'w').write(str(os.getpid()))\\n  re.match('(a+)+$', 'a' * 60 + 'b')\\n")
sys.path.insert(0, folder)
process = RewardProcess(RewardConfig(name="stuck", function="stuck_rewards:stuck"), {})
process.ready()
process.call({"prompts": ["a"], "completions": ["b"]}, 600)
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(USER_CODE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_package_here\n")
    (tmp_path / "large_rewards.py").write_text("held = bytearray(400 << 20)\n\ndef f(prompts, **kwargs): ...\n")
    (tmp_path / "gone_rewards.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards"


def make_source(columns=None, *, scorer=None):
    to_prompt = lambda index, row: Prompt(index=index, text="?", token_ids=(1,), columns=columns or {})  # noqa: E731
    return PromptSource([{}], to_prompt, seed=0, scorer=scorer)


def make_prompt(text="2 + 2?", **columns):
    return Prompt(index=0, text=text, token_ids=(1,), columns=columns)


def make_completion(text="4", finish_reason="stop", token_ids=(7, 8)):
    logprobs = (-1.0,) * len(token_ids)
    return Completion(token_ids=token_ids, logprobs=logprobs, text=text, finish_reason=finish_reason, weight_version=0)


def config(name="mine", **kind):
    return RewardConfig.model_validate({"name": name, **kind})


async def run(function, prompts=None, completions=None, calls=1, **limits):
    rewards = build_rewards([config(function=function, **limits)], make_source())
    try:
        tables = [await score(rewards, prompts or [make_prompt()] * 2, completions or [make_completion()] * 2) for _ in range(calls)]
        return tables[-1]
    finally:
        close_rewards(rewards)


async def test_weighted_sum_leaves_none_out_and_is_nan_when_all_are():
    rewards = [
        Reward(name="a", weight=1.0, function=lambda prompts, completions: [1.0, None, 0.5, None]),
        Reward(name="b", weight=-2.0, function=lambda prompts, completions: [1.0, 3, None, None]),
    ]
    table = await score(rewards, [make_prompt()] * 4, [make_completion()] * 4)
    assert table.values == [[1.0, None, 0.5, None], [1.0, 3.0, None, None]]
    assert table.totals[:3] == [-1.0, -6.0, 0.5]
    assert math.isnan(table.totals[3])


async def test_stopped():
    (reward,) = build_rewards([config("stopped", stopped={}, weight=0.1)], make_source())
    table = await score([reward], [make_prompt()] * 2, [make_completion(), make_completion(finish_reason="length")])
    assert table == RewardTable(names=["stopped"], values=[[1.0, 0.0]], totals=[0.1, 0.0])


async def test_reasoning_gym_gets_the_stripped_text_and_the_entry():
    calls = []

    def scorer(answer, prompt):
        calls.append((answer, prompt.columns["answer"]))
        return 0.5

    (reward,) = build_rewards([config(reasoningGym={})], make_source(scorer=scorer))
    table = await score([reward], [make_prompt(answer="4")], [make_completion(" 4\n")])
    assert (table.totals, calls) == ([0.5], [("4", "4")])


@pytest.mark.parametrize(
    ("text", "completions"),
    [("2 + 2?", ["4", "5"]), ([{"role": "user", "content": "2 + 2?"}], [[{"role": "assistant", "content": text}] for text in "45"])],
)
async def test_a_function_is_called_as_trl_does(user_module, tmp_path, text, completions):
    folder = str(tmp_path)
    prompts = [make_prompt(text, answer=4, level="easy", folder=folder), make_prompt(text, answer=5, level="hard", folder=folder)]
    answers = [make_completion("4", token_ids=(1, 2, 3)), make_completion("5", token_ids=(4,))]
    table = await run(f"{user_module}:shorter", prompts, answers)
    assert table.values == [[-3.0, -1.0]]
    assert json.loads((tmp_path / "seen").read_text()) == {
        "prompts": [text, text],
        "completions": completions,
        "completion_ids": [[1, 2, 3], [4]],
        "answer": [4, 5],
        "level": ["easy", "hard"],
        "folder": [folder] * 2,
    }


async def test_async_functions_keep_their_event_loop_from_call_to_call(user_module):
    assert (await run(f"{user_module}:keeps_its_loop", calls=3)).values == [[1.0, 1.0]]


async def test_an_object_with_an_async_call(user_module):
    assert (await run(f"{user_module}:callable_object")).values == [[None, None]]


async def test_functions_run_at_once():
    meeting = threading.Barrier(2, timeout=10)

    def meets(prompts, completions):
        meeting.wait()
        return [2.0]

    rewards = [Reward(name=name, weight=1, function=meets) for name in ("a", "b")]
    assert (await score(rewards, [make_prompt()], [make_completion()])).totals == [4.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_short", r"rewards\[mine\] returned 1 values for 2 completions"),
        ("not_a_list", r"rewards\[mine\] must return a list of numbers or None, one a completion"),
        ("words", r"rewards\[mine\] must return a list of numbers .* 'good'"),
        ("infinite", r"rewards\[mine\] returned inf for completion 0 of 2, an answer to prompt 0 of the dataset"),
        ("divides", r"rewards\[mine\] returned nan for completion 1 of 2, .* or None where the reward does not apply"),
        ("exits", r"rewards\[mine\] raised SystemExit: 0"),
        ("times_out_itself", r"rewards\[mine\] raised TimeoutError: no answer from the judge"),
        (
            "hangs",
            r"rewards\[mine\] was not done with 2 completions within 1 s: .* raise its timeoutSeconds; it was at\n(.*\n)* .*my_rewards",
        ),
        ("hangs_too", r"rewards\[mine\] was not done with 2 completions within 1 s"),
        ("backtracks", r"(?s)rewards\[mine\] was not done .*my_rewards.py\", line \d+ in backtracks"),
        ("fails", r"rewards\[mine\] raised KeyError: 'colour' \(.*my_rewards.py:\d+\)"),
        (
            "takes_all",
            r"rewards\[mine\] ran out of memory \(.*my_rewards.py:\d+\); its memoryLimit is 300Mi: raise it, or let the function",
        ),
        (
            "crashes",
            r"(?s)rewards\[mine\]: its process was killed by SIGSEGV .* with 2 completions; it was at.*my_rewards.py\", .* in crashes",
        ),
        ("leaves", r"rewards\[mine\]: its process ended with exit code 0 with 2 completions"),
        ("is_killed", r"rewards\[mine\]: its process was killed by SIGKILL \(probably the pod ran out of memory"),
        ("talks_nonsense", r"rewards\[mine\]: its process sent what is no reply"),
        (
            "asks_the_judge",
            r"raised KeyError: 'JUDGE_API_KEY'; JUDGE_API_KEY is set in the pod, and rewards get it where their `env` names it",
        ),
    ],
)
async def test_what_goes_wrong_in_a_function_names_the_reward(user_module, monkeypatch, function, message):
    monkeypatch.setenv("JUDGE_API_KEY", "sesame")
    with pytest.raises(RewardError, match=message):
        await run(f"{user_module}:{function}", timeoutSeconds=1 if "not done" in message else 60, memoryLimit="300Mi")


async def test_a_function_gets_the_credentials_that_it_asks_for_by_name_and_no_others(user_module, monkeypatch, tmp_path):
    for name in ("JUDGE_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("RANK", "3")
    assert (await run(f"{user_module}:asks_the_judge", env=["JUDGE_API_KEY"])).values == [[1.0, 1.0]]
    await run(f"{user_module}:names", [make_prompt(folder=str(tmp_path))], [make_completion()], env=["JUDGE_API_KEY"])
    seen = set(json.loads((tmp_path / "names").read_text()))
    assert {"PATH", "RANK", "JUDGE_API_KEY"} <= seen
    assert {name for name in seen if os.environ.get(name) == "sesame"} == {"JUDGE_API_KEY"}
    with pytest.raises(ValueError, match=r"rewards\[mine\]\.env: NO_SUCH_KEY is not set in the trainer's pods; set it in podTemplate.env"):
        await run(f"{user_module}:names", env=["NO_SUCH_KEY"])


@pytest.mark.skipif(
    ctypes.CDLL(None).syscall(444, None, 0, 1) < 2, reason="this kernel has no Landlock of version 2; the rank's log warns there"
)
def test_a_function_reads_no_variables_and_no_memory_of_its_rank(user_module, tmp_path):
    (tmp_path / "rank.py").write_text(UNPRIVILEGED)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, tmp_path / "rank.py", tmp_path], capture_output=True, text=True, env=environ, timeout=60)
    assert done.stdout.splitlines() == ["a child without limits: [3.0]", "spies: [0.0]", "moves: [1.0]"], done.stderr


async def test_what_a_function_started_ends_with_it(user_module, tmp_path):
    with pytest.raises(RewardError, match=r"was not done with 1 completions within 1 s"):
        await run(f"{user_module}:starts_others", [make_prompt(folder=str(tmp_path))], [make_completion()], timeoutSeconds=1)
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z", "the function's own process has ended", 10)


async def test_a_column_that_cannot_leave_the_rank_is_named(user_module):
    with pytest.raises(RewardError, match=r"rewards\[mine\]: column lock cannot be given to the reward's process .* leave it out"):
        await run(f"{user_module}:shorter", [make_prompt(lock=threading.Lock())], [make_completion()])


def test_a_function_ends_with_its_rank_whatever_it_is_at(user_module, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    rank = subprocess.Popen([sys.executable, tmp_path / "rank.py", tmp_path], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the function runs", 60)
    process = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert process.exists()
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    wait_until(lambda: not process.exists() or process.read_text().split()[2] == "Z", "the function's process has ended", 10)


def test_a_function_that_keeps_pythons_lock_is_given_up_on_with_its_stack(tmp_path):
    (tmp_path / "program.py").write_text(LOCKED)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    log = tmp_path / "stderr.log"
    log.write_text(done.stderr)
    assert "in backtracks" in describe_error(tmp_path / "error.json", [log])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"function": "no_such_module:f"}, r"rewards\[mine\]\.function: .* No module named 'no_such_module'; put it on PYTHONPATH"),
        ({"function": "broken_rewards:f"}, r"importing broken_rewards failed with ModuleNotFoundError: .*no_such_package_here"),
        ({"function": "my_rewards:shorte"}, r"module my_rewards has no shorte; it has .*shorter"),
        ({"function": "large_rewards:f", "memoryLimit": "300Mi"}, r"failed with MemoryError: .*; its memoryLimit is 300Mi: raise it"),
        ({"function": "my_rewards:NOT_A_FUNCTION"}, r"NOT_A_FUNCTION is a int, not a function"),
        ({"reasoningGym": {}}, r"rewards\[mine\]\.reasoningGym: the dataset is not one of reasoning-gym"),
        ({"accuracy": {}}, r"rewards\[mine\]\.accuracy needs a column `solution` or `answer`; the dataset has level"),
    ],
)
def test_what_cannot_be_built_is_told_with_its_name(user_module, kind, message):
    with pytest.raises(ValueError, match=message):
        build_rewards([config(**kind)], make_source({"level": 1}))


def test_a_process_that_ends_while_it_imports_is_told(user_module):
    with pytest.raises(RewardError, match=r"rewards\[mine\]: its process ended with exit code 3 while it imported gone_rewards:f"):
        build_rewards([config(function="gone_rewards:f")], make_source())


async def test_a_rank_without_completions_and_the_table_of_all_ranks():
    rewards = [Reward(name="a", weight=1.0, function=lambda prompts, completions: [1.0 for _ in prompts])]
    tables = [await score(rewards, [make_prompt()] * n, [make_completion()] * n) for n in (2, 0, 1)]
    assert RewardTable.concat(tables) == RewardTable(names=["a"], values=[[1.0] * 3], totals=[1.0] * 3)
