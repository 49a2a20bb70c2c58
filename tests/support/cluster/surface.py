"""Checks of what `grpo` shows of a job that trains: its curve, merged logs, a bug report."""

import io
import re
import tarfile
import tempfile
from pathlib import Path

from click.testing import CliRunner

from grpo_cli.main import main
from grpo_devcluster.progress import wait_until
from support.cluster.jobs_on_cluster import JobOnCluster

SECRET = "correct-horse-battery"
"""Value of the variable CHAOS_TOKEN, whose name marks it as a secret."""

PRINT = """
import os, pathlib
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if b"grpo_workload.trainer_pod" in (process / "cmdline").read_bytes():
        (process / "fd" / "1").open("w").write(f"the token is {os.environ['CHAOS_TOKEN']}\\n")
"""
"""Print the secret into the log, as code of the pod would."""


def check_surface(job: JobOnCluster) -> None:
    """Look at the job `tiny`, of one rank in each of two pods, as a person would."""

    def grpo(command: str, *args: str) -> str:
        at = ["--kubeconfig", str(job.kubeconfig), "-n", job.namespace]
        result = CliRunner().invoke(main, [command, "tiny", *args, *at])
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = grpo("status")
    assert re.search(r"reward +[▁-█ ]+  \d\.\d+ → \d\.\d+ in \d+ steps", shown), shown
    assert re.search(r"\d+ steps · \d+% · ETA ", shown), shown
    assert "rank 0  " in shown

    job("exec", "tiny-a-0", "--", "python", "-c", PRINT)
    wait_until(lambda: SECRET in grpo("logs", "--tail", "50"), "the token in the log", 60)
    logs = grpo("logs").splitlines()
    assert {line.partition(" | ")[0] for line in logs} == {"tiny-a-0", "tiny-b-0"}
    assert any("step 2: reward" in line for line in logs)
    own = grpo("logs", "--rank", "1").splitlines()
    assert own
    assert all(line.startswith("tiny-b-0 | [rank 1] ") for line in own)
    assert len(grpo("logs", "--role", "trainer", "--tail", "1").splitlines()) == 2

    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "report.tar.gz"
        grpo("diagnose", "--output", str(archive))
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
            files = {member.name: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]
    assert [name for name, text in files.items() if SECRET in text] == []
    assert "[removed]" in files["report/logs/tiny-a-0.log"]
    assert any(name.startswith("report/operator/logs/grpo-operator-") and text for name, text in files.items())
