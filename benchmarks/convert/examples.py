"""Count the examples of other trainers that `grpo convert` takes over whole.

Examples are read out of git's objects, so bare clones do; they are not part of this repository:

    for name in modelscope/ms-swift verl-project/verl OpenRLHF/OpenRLHF huggingface/trl; do
        git clone --bare --depth 1 https://github.com/$name $(basename $name)
    done
    python -m benchmarks.convert.examples ms-swift verl OpenRLHF trl --output benchmarks/results/convert_examples.json

Counted are examples that train with GRPO without Megatron. One is whole if nothing is left but what only its user can
name: the dataset, the code of rewards, the model's path on another machine, secrets, and values of variables that it
does not set. Examples that are not whole because a job has no such thing (`MISSING`) are counted apart.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from grpo_cli.convert.conversion import Conversion, convert
from grpo_cli.convert.read import read
from grpo_cli.convert.rows import Finding
from grpo_cli.convert.settle import Given

GIVEN = Given(nodes=1, rows=10_000)  # and 8 GPUs, if the example does not say how many
OF_THE_USER = re.compile(
    r"external_plugins|external_reward|reward(?!\.(stop|normalize|clip|model_name))|custom_cls|custom_reward|data\.custom_cls|.*(_API_KEY|_TOKEN)$"
)
FIELDS_OF_THE_USER = ("dataset", "evaluation.dataset", "rewards", "model.name", "model.path", "training.runName")
UNSET = re.compile(
    r"the script does not set this variable|only a run shows (parser\.add_argument|script_args\.|prompt_path\.)"
)
NOT_SET = re.compile(r"(\w+) is not set in the script")
MISSING = {  # by what an option's name, or the refusal of an example, says
    "another engine of training": r"\.veomni\.|model_engine|actor\.strategy",
    "code of model repositories": r"trust_remote_code",
    "rejected samples": r"rollout_rs|rollout_is_batch_normalize",
    "losses with a part of their own": r"chord_|fipo_|^loss_type",
    "turns by the code of another tool": r"max_turns|multi_turn|use_gym_env|agent_template|agent_func_path",
    "one completion of a prompt": r"training\.numGenerations: Input should be greater",
    "an engine over several nodes": r"a tensor-parallel group cannot span pods",
    "videos": r"_video_",
    "rows that a service gives": r"only a run shows spec\.train_dataset",
    "rows that a script filters or splits": r"(filter|train_test_split|remove_columns) of the dataset",
}


@dataclass(frozen=True, slots=True)
class Examples:
    """A repository's examples: their folders, and the text that shows that one trains with GRPO."""

    folders: tuple[str, ...]
    ending: str
    trains: str
    groups: str = "grpo"  # what, in small letters, says that completions of a prompt are compared


EXAMPLES = {
    "ms-swift": Examples(("examples",), ".sh", r"swift rlhf"),
    "verl": Examples(("examples",), ".sh", r"verl\.trainer\.main_ppo"),
    "OpenRLHF": Examples(("examples",), ".sh", r"openrlhf\.cli\.train_ppo_ray", r"group_norm|reinforce_baseline"),
    "trl": Examples(("examples", "trl/scripts"), ".py", r"\bGRPOTrainer\("),
}


def is_named_by_the_user(finding: Finding) -> bool:
    """Whether an option is left because it says what only the user can: data, rewards' code, paths, secrets."""
    return bool(
        finding.to.startswith(FIELDS_OF_THE_USER) or OF_THE_USER.match(finding.name) or UNSET.search(finding.note)
    )


def git(repository: Path, *arguments: str) -> str:
    """Return what git prints."""
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode(errors="replace")


def examples_of(repository: Path) -> Iterator[tuple[str, str]]:
    """Paths and texts of the examples that are counted."""
    examples = EXAMPLES[repository.name]
    for path in git(repository, "ls-tree", "-r", "--name-only", "HEAD", "--", *examples.folders).splitlines():
        if not path.endswith(examples.ending):
            continue
        text = git(repository, "show", f"HEAD:{path}")
        if (
            re.search(examples.trains, text)
            and re.search(examples.groups, text.lower())
            and "megatron" not in text.lower()
        ):
            yield path, text


def missing(said: str) -> list[str]:
    """Return what a job has not, of what is said of an example."""
    return [what for what, pattern in MISSING.items() if re.search(pattern, said)]


def converted(name: str, text: str) -> Conversion:
    """Convert an example; variables that it needs and does not set get a value."""
    variables: dict[str, str] = {}
    while True:
        try:
            conversion = convert(read(name, text, variables=variables), GIVEN)
            if any(one.name == "GPUs" for one in conversion.left):
                conversion = convert(read(name, text, variables=variables), replace(GIVEN, gpus=8))
        except ValueError as error:
            unset = NOT_SET.search(str(error))
            if unset is None or unset[1] in variables:
                raise
            variables[unset[1]] = "/data"
        else:
            return conversion


def count(repository: Path) -> dict[str, Any]:
    """Convert the examples of a repository; return the counts, and what is left of each example."""
    left: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    lacks: dict[str, list[str]] = {}
    for name, text in examples_of(repository):
        try:
            conversion = converted(name, text)
        except ValueError as error:
            refused[name] = str(error)
            said = [name, str(error)]
        else:
            found = [one for one in conversion.left if not is_named_by_the_user(one)]
            left[name] = sorted({one.name for one in found})
            said = [name, *(f"{one.name}: {one.note}" for one in found)]
        if lacking := sorted({what for each in said for what in missing(each)}):
            lacks[name] = lacking
    options = Counter(option for name, options in left.items() if name not in lacks for option in options)
    return {
        "commit": git(repository, "log", "-1", "--format=%H %cs", "HEAD").strip(),
        "examples": len(left) + len(refused),
        "whole": sum(not options and name not in lacks for name, options in left.items()),
        "use what is missing": len(lacks),
        "missing": lacks,
        "refused": refused,
        "left": left,
        "most often left of others": options.most_common(20),
    }


@click.command()
@click.argument("repositories", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(repositories: tuple[Path, ...], output: Path) -> None:
    """Convert the examples of REPOSITORIES, which are named as in `EXAMPLES`, and write the counts to OUTPUT."""
    counts = {repository.absolute().name: count(repository) for repository in repositories}
    for name, found in counts.items():
        others = found["examples"] - found["use what is missing"]
        print(f"{name}: {found['whole']} of {others} whole, and {found['use what is missing']} use what is missing")
    output.write_text(json.dumps({"repositories": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
