"""Convert a checkpoint's optimizer state for another number of ranks or another ZeRO stage (1, 2 or 3).

`python -m grpo_workload.storage.zero_conversion SOURCE TARGET` converts it into DeepSpeed's universal format, in its
own process because DeepSpeed's converter forks and writes to stdout.
DeepSpeed 0.19's converter omits some of what loading needs between stages 1 or 2 and stage 3. This module adds it: the
step of each parameter, the layout of tensors and of the common state, and the model's file under the other name. Nobody
reads the weights in that file, since they come from the master weights.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_workload.ranks.environment import hide
from grpo_workload.storage.manifest import seal, write_manifest

TAIL = 1000  # characters of the converter's output that an error message quotes
_MODEL_FILES = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)  # names under stages 1 and 2, and under stage 3


class Conversion:
    """A running conversion."""

    def __init__(self, source: Path, target: Path) -> None:
        """Start to convert `source`, which DeepSpeed saved, into the empty folder `target`, with a manifest."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process runs
        command = [sys.executable, "-m", __name__, str(source), str(target)]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """Return the end of its output."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-TAIL:]


def convert(source: Path, target: Path) -> None:
    """Convert `source` into `target`, and write the manifest."""
    hide()
    from deepspeed.checkpoint import ds_to_universal

    plain = target / "plain"
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(with_plain_moments(source, plain)),
            output_folder=str(target),
            num_extract_workers=4,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    (target.parent / "latest_universal").unlink()  # DeepSpeed's pointer to it, which nothing here reads
    shutil.rmtree(plain, ignore_errors=True)
    complete(target)
    files = [path for path in target.rglob("*") if path.is_file()]
    write_manifest(target, {str(path.relative_to(target)): seal(path) for path in files})


def with_plain_moments(source: Path, scratch: Path) -> Path:
    """Return `source` if no moments in it are in 8 bits, else `scratch`, into which it is copied with float32 ones."""
    import torch

    for path in sorted(source.glob("*_optim_states.pt")):
        content = torch.load(path, map_location="cpu", weights_only=False)
        saved = content["optimizer_state_dict"]
        base = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]  # stages 1 and 2, and stage 3
        if any("exp_avg" in state for state in base["state"].values()):
            return source
        from grpo_workload.policy.step.int8_moments import as_plain  # late: see `environment.show`

        if not scratch.exists():
            shutil.copytree(source, scratch, ignore=shutil.ignore_patterns("*_optim_states.pt"))
        base["state"] = {key: as_plain(state) for key, state in base["state"].items()}
        torch.save(content, scratch / path.name)
    return scratch


def complete(target: Path) -> None:
    """Make the converter's output loadable under every stage from 1 to 3."""
    import deepspeed
    import torch
    from deepspeed.checkpoint.constants import PARAM

    def read(path: Path) -> Any:
        return torch.load(path, map_location="cpu", weights_only=False)

    states = target / "zero"
    common = read(states / "optimizer_state.pt")
    if "optimizer_state_dict" in common:
        step = common["optimizer_state_dict"]["state"][0]["step"]
        for path in states.glob("*/*.pt"):
            torch.save({PARAM: read(path)}, path)
        for path in states.glob("*/exp_avg.pt"):
            torch.save(step, path.with_name("step.pt"))
    else:
        step = read(next(states.glob("*/step.pt")))
    groups = common["param_groups"]
    scaler = {key: common[key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow") if key in common}
    whole = {"ds_version": deepspeed.__version__, "param_groups": groups}
    under_zero_3 = {"optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups}}
    torch.save(scaler | whole | under_zero_3, states / "optimizer_state.pt")

    model = read(next(target / name for name in _MODEL_FILES if (target / name).exists()))
    for path in target.glob("*_model_states.pt"):
        path.unlink()
    for name in _MODEL_FILES:
        torch.save(model | {"module": {}}, target / name)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
