"""Count the example scripts of ms-swift and verl that `grpo convert` takes over whole.

The scripts are read from checkouts of the two repositories, which are not part of this one:

    git clone --depth 1 https://github.com/modelscope/ms-swift && git clone --depth 1 https://github.com/volcengine/verl
    python -m benchmarks.convert.examples ms-swift verl --output benchmarks/results/convert_examples.json

Counted are scripts that train with GRPO without Megatron. A script is whole if nothing is left but what only its user
can name: the dataset, the code of rewards, the model's path on another machine, secrets, and values of variables that
the script does not set.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from grpo_cli.convert.conversion import convert
from grpo_cli.convert.read import read
from grpo_cli.convert.rows import Finding
from grpo_cli.convert.settle import Given

CALLS = re.compile(r"swift rlhf|verl\.trainer\.main_ppo")
GIVEN = Given(nodes=1, rows=10_000)  # and 8 GPUs, if the script does not say how many
OF_THE_USER = re.compile(
    r"external_plugins|external_reward|reward|custom_cls|custom_reward|data\.custom_cls|.*(_API_KEY|_TOKEN)$"
)
FIELDS_OF_THE_USER = ("dataset", "evaluation.dataset", "rewards", "model.name", "model.path")
UNSET = "the script does not set this variable"


def is_named_by_the_user(finding: Finding) -> bool:
    """Whether an option is left because it says what only the user can: data, rewards' code, paths, secrets."""
    return bool(finding.to.startswith(FIELDS_OF_THE_USER) or OF_THE_USER.match(finding.name) or UNSET in finding.note)


def count(checkout: Path) -> dict[str, object]:
    """Convert the scripts below `examples` of a checkout; return the counts, and what is left of each script."""
    left: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for path in sorted((checkout / "examples").rglob("*.sh")):
        text = path.read_text(errors="replace")
        if not CALLS.search(text) or "grpo" not in text.lower() or "megatron" in text.lower():
            continue
        name = str(path.relative_to(checkout))
        try:
            conversion = convert(read(name, text), GIVEN)
            if any(one.name == "GPUs" for one in conversion.left):
                conversion = convert(read(name, text), replace(GIVEN, gpus=8))
        except ValueError as error:
            refused[name] = str(error)
            continue
        left[name] = sorted({one.name for one in conversion.left if not is_named_by_the_user(one)})
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    options = Counter(option for options in left.values() for option in options)
    return {
        "commit": commit,
        "scripts": len(left) + len(refused),
        "whole": sum(not options for options in left.values()),
        "one option left": sum(len(options) == 1 for options in left.values()),
        "refused": refused,
        "left": left,
        "most often left": options.most_common(20),
    }


@click.command()
@click.argument("checkouts", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(checkouts: tuple[Path, ...], output: Path) -> None:
    """Convert the examples of CHECKOUTS and write the counts to OUTPUT."""
    counts = {checkout.resolve().name: count(checkout) for checkout in checkouts}
    for name, found in counts.items():
        print(f"{name}: {found['whole']} of {found['scripts']} scripts whole, {found['one option left']} but for one")
    output.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
