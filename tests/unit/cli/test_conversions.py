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
    "script": "",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_an_option_becomes_a_field_or_is_told(row: list[Any]) -> None:
    source, options, fields, told, given = [*row, {}, {}][:5]
    source, *others = source.split("+")
    name = {"verl": "verl.sh", "yaml": "trl.yaml"}.get(source, "run.sh") if source in COMMANDS else source
    begin = COMMANDS[source] if source in COMMANDS else (INPUTS / source).read_text().rstrip().removesuffix("$@")
    between = "\n" if name.endswith(".yaml") else " "
    sources = read(name, f"{begin.rstrip().removesuffix(chr(92))}{between}{options}\n")
    sources = [*sources, *(one for other in others for one in read(other, (INPUTS / other).read_text()))]
    conversion = convert(sources, Given(**given))
    assert {path: _at(conversion.spec, path) for path in fields} == fields
    for about, expected in told.items():
        found = [one for one in conversion.left if re.search(about, one.name)]
        assert [one.name for one in found] == [one.partition(": ")[0] for one in expected]
        assert [one for one, said in zip(found, expected, strict=True) if said.partition(": ")[2] not in one.note] == []
    if source in ("verl.sh", "trl.yaml", "swift-all-maps.sh"):
        parse_spec(conversion.spec)


def _at(spec: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        spec = (spec or {}).get(part)
    return spec
