"""Options of other tools become the fields of conversions.yaml, and nothing else of them is left to tell."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_cli.convert.conversion import convert
from grpo_cli.convert.read import read
from grpo_cli.convert.settle import Given
from grpo_operator.api.spec import parse_spec
from support.paths import CONVERT_INPUTS as INPUTS

ROWS = yaml.safe_load((Path(__file__).parent / "conversions.yaml").read_text())
COMMANDS = {
    "swift": "swift rlhf --rlhf_type grpo --model a/b --dataset c/d",
    "verl": "python3 -m verl.trainer.main_ppo",
    "trl": "trl grpo --model_name_or_path a/b",
    "yaml": "",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_an_option_becomes_a_field_or_is_told(row: list[Any]) -> None:
    source, options, fields, told = [*row, {}][:4]
    name = {"verl": "verl.sh", "yaml": "trl.yaml"}.get(source, "run.sh") if source in COMMANDS else source
    given = COMMANDS[source] if source in COMMANDS else (INPUTS / source).read_text().rstrip().removesuffix("$@")
    between = "\n" if name.endswith(".yaml") else " "
    conversion = convert(read(name, f"{given.rstrip().removesuffix(chr(92))}{between}{options}\n"), Given())
    assert {path: _at(conversion.spec, path) for path in fields} == fields
    left = [one.name for one in conversion.left]
    assert {about: [one for one in left if re.search(about, one)] for about in told} == told
    if source in ("verl.sh", "trl.yaml", "swift-all-maps.sh"):
        parse_spec(conversion.spec)


def _at(spec: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        spec = (spec or {}).get(part)
    return spec
