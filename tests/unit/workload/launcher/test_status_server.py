"""Texts of samples leave a launcher over loopback alone; its open port tells names and numbers, whatever is asked."""

import socket
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from grpo_spec.reasons import Reason
from grpo_spec.reports import ExitCode, Outcome
from grpo_workload.algorithm.samples import Completion, Prompt, Sample
from grpo_workload.launcher.place import Place
from grpo_workload.launcher.status_server import Status, open_application, serving
from grpo_workload.reporting.run_report import RankReport, RunReport
from support.trainer.launchers import free_ports
from support.trainer.places import place, rank_step

SECRET = "the patient's name is"
SAMPLE = Sample(
    prompt=Prompt(index=0, text=SECRET, token_ids=(1,)),
    completion=Completion(token_ids=(1,), logprobs=(0.0,), text=SECRET, finish_reason="stop", weight_version=0),
    reward=1.0,
    advantage=0.5,
)


def trained(folder: Path) -> Place:
    """Return rank 0's pod after a step, with its status port free on this machine."""
    at = place(folder, "job-a-0")
    port = free_ports(1)[0]
    members = tuple(member.model_copy(update={"status_port": port}) for member in at.contract.members)
    at = replace(at, contract=at.contract.model_copy(update={"members": members}), data_dir=folder / "data")
    report = RunReport(at.run_dir, at.state_dir, total_steps=9, step=0)
    metrics = {"reward": 0.25, "step_time": 2.0, "tokens_per_second": 300.0}
    report.step(0, metrics, [SAMPLE], [rank_step(rank) for rank in range(3)])
    report.close()
    RankReport(at.state_dir, 1).phase("Rewarding")
    return at


def addresses_at(port: int) -> set[str]:
    """Return the addresses of this machine on which somebody listens at a port."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    return {
        line[1].removesuffix(f":{port:04X}") for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")
    }


@pytest.mark.parametrize("ended", [False, True])
async def test_no_route_of_the_open_port_returns_texts_of_samples(tmp_path: Path, *, ended: bool) -> None:
    at = trained(tmp_path)
    status = Status(at)
    if ended:
        quoting = f"rank 0 failed with exit code 1: RewardError: rewards[r] raised ValueError: {SECRET}"
        status.end(Outcome(attempt=3, exit_code=ExitCode.RANK_FAILED, reason=Reason.RANK_FAILED, message=quoting))
    paths = {resource.canonical for resource in open_application(status).router.resources()}
    assert paths >= {"/identity", "/progress", "/metrics"}
    async with serving(status), aiohttp.ClientSession(f"http://127.0.0.1:{at.member.status_port}") as client:
        answers = {}
        for path in [*sorted(paths), "/history?of=completions", "/history", "/completions", "/", "/nothing"]:
            async with client.get(path) as answer:
                answers[path] = answer.status, await answer.text()
    assert not [path for path, (_, text) in answers.items() if SECRET in text]
    assert {path for path, (code, _) in answers.items() if code == 200} >= paths - {"/readyz"}
    assert answers["/history?of=completions"][0] == 404


async def test_the_history_is_served_on_loopback_at_the_port_that_the_identity_names(tmp_path: Path) -> None:
    at = trained(tmp_path)
    async with serving(Status(at)), aiohttp.ClientSession() as client:
        async with client.get(f"http://127.0.0.1:{at.member.status_port}/identity") as answer:
            port = (await answer.json())["localPort"]
        async with client.get(f"http://127.0.0.1:{port}/history?of=completions") as answer:
            rows = (await answer.json())["completions"]
        listening = addresses_at(port)
    assert (rows[0]["prompt"], rows[0]["completion"]) == (SECRET, SECRET)
    assert listening == {"0100007F"}, "127.0.0.1, as the kernel writes it"


async def test_a_status_port_that_is_taken_is_an_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    at = trained(tmp_path)
    status = Status(at)
    taken = pytest.raises(OSError, match=str(at.member.status_port))
    with socket.create_server(("", at.member.status_port)), taken:
        async with serving(status):
            pass
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", status.local_port)):
        pass
