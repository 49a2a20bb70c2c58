"""An S3-compatible server that checks signatures: Versity's gateway, built from its Go module; objects are files."""

from __future__ import annotations

import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.control_plane.peers import Peer, build

from grpo_cli.local.processes import free_ports
from grpo_devcluster.progress import wait_until

GATEWAY = Peer("versitygw", "github.com/versity/versitygw", "v1.8.0", "./cmd/versitygw", "", "")
BUCKET = "models"


class ObjectStorage:
    """A server with one bucket."""

    def __init__(self, folder: Path) -> None:
        """Prepare it below `folder`, with a port of its own."""
        (self._port,) = free_ports(1)
        self._folder = folder
        self.bucket = folder / "buckets" / BUCKET
        self.bucket.mkdir(parents=True)
        (folder / "metadata").mkdir()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [str(build(GATEWAY)), f"--port=127.0.0.1:{self._port}", "--quiet"]
        command += ["posix", f"--sidecar={self._folder / 'metadata'}", str(self._folder / "buckets")]
        env = os.environ | {"ROOT_ACCESS_KEY": "user", "ROOT_SECRET_KEY": "secret"}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self._folder)
        wait_until(self._answers, "the object storage answers", 30)

    def stop(self) -> None:
        """End it; its objects stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.env["AWS_ENDPOINT_URL"], timeout=5)
        except urllib.error.HTTPError:  # it wants a signature
            return True
        except OSError:
            return False
        return True
