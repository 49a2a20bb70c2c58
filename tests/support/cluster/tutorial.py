"""The commands and files of docs/tutorial.md, run in order on the cluster."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_devcluster import binaries
from support.cluster.jobs_on_cluster import JobOnCluster
from support.documents import blocks, commands
from support.paths import ROOT

PAGE = ROOT / "docs/tutorial.md"

UNTIL_CTRL_C = "# until Ctrl-C"
CUT = "..."
PRINTED: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


@dataclass
class Tutorial:
    """A reader who follows the page in `folder`: writes its files, types its commands and looks at what they print.

    `adapted` has what another text stands for in a command, as this machine has no network.
    """

    job: JobOnCluster
    folder: Path
    adapted: dict[str, str]
    _steps: Iterator[tuple[str, list[str]]] = field(init=False)
    _env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = self._read()
        kubeconfig = self.folder / "kubeconfig"
        kubeconfig.write_text(self.job.kubeconfig.read_text())
        path = [str(binaries.bin_dir()), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._env = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "COLUMNS": "150",
        }
        self._shell(f"kubectl config set-context --current --namespace={self.job.namespace}")

    def _read(self) -> Iterator[tuple[str, list[str]]]:
        """Yield commands with the lines that the page shows below them, and write each file where it stands."""
        for block in blocks(PAGE):
            if block.language == "console":
                yield from commands(block.text)
            else:
                name = block.text.partition("\n")[0].removeprefix("# ")
                (self.folder / name).write_text(block.text)

    def through(self, last: str) -> None:
        """Do what the page says next, up to the command that begins with `last`."""
        for command, shown in self._steps:
            said = self._shell(self._adapt(command))
            printed = said.replace(f"{self.job.namespace}/", "default/").splitlines()
            missing = [line for line in shown if not _is_among(line, printed)]
            assert missing == [], f"$ {command}"
            if command.startswith(last):
                return
        raise AssertionError(f"the page has no command {last} here")

    def start(self, command: str, *options: str) -> subprocess.Popen[str]:
        """Start the page's next command, which must be this one and go on until Ctrl-C."""
        found, _ = next(self._steps)
        typed, mark, _ = found.partition(UNTIL_CTRL_C)
        assert (typed.split(), bool(mark)) == (command.split(), True), found
        return subprocess.Popen([*command.split(), *options], cwd=self.folder, env=self._env, text=True, **PRINTED)

    def change(self, file: str, changes: dict[str, str]) -> None:
        """Replace texts of a file that the page has, each of which must be in it."""
        text = (self.folder / file).read_text()
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        (self.folder / file).write_text(text)

    def has_ended(self) -> bool:
        """Whether no command of the page is left."""
        return next(self._steps, None) is None

    def _adapt(self, command: str) -> str:
        for old, new in self.adapted.items():
            command = command.replace(old, new)
        return command

    def _shell(self, command: str) -> str:
        started = time.monotonic()
        shell = ["bash", "-ec", command]
        done = subprocess.run(shell, cwd=self.folder, env=self._env, text=True, timeout=600, **PRINTED)
        sys.stdout.write(f"$ {command}    # {time.monotonic() - started:.0f} s\n{done.stdout}\n")
        assert done.returncode == 0, f"$ {command}"
        return done.stdout


def _is_among(shown: str, printed: list[str]) -> bool:
    """Whether a line of the page is printed, with any text in place of ... in it."""
    wanted = re.compile(".*".join(map(re.escape, shown.split(CUT))))
    return any(wanted.fullmatch(line.rstrip()) for line in printed)
