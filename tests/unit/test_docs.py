"""Pages of docs/ say all that programs say."""

import re
from pathlib import Path

from grpo_operator.names import Reason

DOCS = Path(__file__).parents[2] / "docs"


def test_every_reason_has_a_row() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "failures.md").read_text(), re.MULTILINE))
    assert {str(reason) for reason in Reason} - explained == set()
    workload = Path(__file__).parents[2] / "workload" / "grpo_workload"
    said = {
        word
        for file in ("launch", "engine_process", "run_once", "peers", "ranks")
        for word in re.findall(
            r'"((?:Peers?|Rank|Engine|Config|Stopped|Launcher|Contract)[A-Z]?[A-Za-z]*)"', (workload / f"{file}.py").read_text()
        )
    }
    assert {"PeerLost", "RankFailed"} <= said
    assert said - explained == set()
