"""Environment pods as processes of this machine, and a rank's sessions on them."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from grpo_cli.local.processes import free_ports
from grpo_devcluster.progress import wait_until
from grpo_spec import contract as c
from grpo_spec.schema import WITHOUT_RULES
from grpo_spec.trainer import TrainerConfig
from grpo_workload.environments.pods.host import PodHost
from grpo_workload.environments.sessions import RankSessions
from support.trainer.places import contract_json

JOB = c.JobRef(namespace="ns", name="job", uid="uid")


class EnvironmentPod:
    """The process of a pod, with `config`'s tools and environments."""

    def __init__(self, folder: Path, config, *, sessions=64, environ=None, job=JOB):
        self.sessions, self.port = sessions, free_ports(1)[0]
        self.address, self._folder, self._environ = f"127.0.0.1:{self.port}", folder, environ or os.environ
        self.contract = c.EnvironmentPodContract(
            job=job,
            group="games",
            port=self.port,
            sessions=sessions,
            is_local=True,
            tools=config.tools,
            environments=config.environments,
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self):
        """Start the process, or start it again."""
        (self._folder / "contract.json").write_text(self.contract.model_dump_json(by_alias=True, exclude_none=True))
        variables = {
            c.ENV_CONTRACT: str(self._folder / "contract.json"),
            c.ENV_TERMINATION_LOG: str(self._folder / "termination-log"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "grpo_workload.environment_pod"],
                env={**self._environ, **variables},
                stdout=log,
                stderr=log,
            )

    def ready(self) -> tuple[int, str]:
        """Return what GET /ready answers; 0 if nothing does."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/ready", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def wait_until_ready(self):
        """Wait until it takes sessions."""
        wait_until(lambda: self.ready()[0] == 200, f"{self.address} is ready", 120)

    def log(self) -> str:
        """Return what it has logged."""
        return (self._folder / "log").read_text()

    def termination_message(self) -> str:
        """Return what it has left."""
        return (self._folder / "termination-log").read_text()

    def kill(self):
        """Kill it, as a node that is lost does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> tuple[int, float]:
        """End it as a kubelet does; returns its exit code, and the seconds that it took."""
        begun = time.monotonic()
        self.process.terminate()
        return self.process.wait(60), time.monotonic() - begun


def contract_of(config: TrainerConfig, *addresses: str, sessions=64, groups=None) -> c.Contract:
    """Return the contract of a rank with pods at these addresses, in one group unless `groups` says otherwise."""
    group = {"name": "games", "sessions": sessions, "environments": [one.name for one in config.environments]}
    pods = groups or [group | {"addresses": addresses}]
    values = contract_json({}, job=JOB, device="cpu", environmentPods=pods) | {"config": config}
    return c.Contract.model_validate(values, context=WITHOUT_RULES)


def connect(config, *addresses, sessions=64, groups=None, rank=0, wants_reward=False, wants_state=False, **host):
    """Return a rank's sessions on pods; `host` are further arguments of `PodHost`."""
    contract = contract_of(config, *addresses, sessions=sessions, groups=groups)
    found = RankSessions(PodHost(contract, rank, **host), config, wants_reward=wants_reward)
    found.wants_state = wants_state
    return found
