"""Reference answers of public test sets, and wrong numbers taken from them: those that the reward `accuracy` pays.

    python -m benchmarks.rewards.references --folder answers --output references.jsonl

The folder holds a file for each set, SET.jsonl, with the columns of the published one that hold answers (`answer`,
`solution`, or `final_answer` of OlympiadBench). Of each set a line says:

* rows: how many there are; unread: those whose reference cannot be read.
* right: completions that give the reference in a box and are paid. comparable: those that math-verify finds equal to
  the same reference in a box.
* wrong: numbers that occur in a reference, or in its solution, and that math-verify, given both in boxes, does not find
  equal to the reference; wrong_paid: those that are paid.
* seconds: medians over rows for one comparison, of this reward and of math-verify by itself, each with the right answer
  and seven wrong numbers. Both read the reference; this reward does so once for all completions of a prompt.

Only counts are stored. `--show` prints what was not as it should be.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from math_verify import parse, parser, verify

from benchmarks.common.runs import append, versions
from grpo_workload.rewards.math_verdict import verify_answers
from grpo_workload.rewards.references import References, boxed, read_row

NUMBER = re.compile(r"\d+(?:\.\d+)?")
MOST_NUMBERS = 20  # of a row
TIMED = 8  # completions of a prompt


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("references.jsonl"), show_default=True)
@click.option("--show", is_flag=True, help="Print the references that are not paid, and wrong numbers that are.")
def main(folder: Path, output: Path, show: bool) -> None:
    """Measure every set of the folder, and append a line for each."""
    head: dict[str, Any] = {"versions": versions("math_verify", "latex2sympy2_extended", "sympy")}
    head |= {"command": "python -m benchmarks.rewards.references --folder answers"}
    for path in sorted(folder.glob("*.jsonl")):
        line = {"set": path.stem} | _measure([json.loads(text) for text in path.read_text().splitlines()], show=show)
        print(line, flush=True)
        append(output, line | head)


def _measure(rows: list[dict[str, Any]], *, show: bool) -> dict[str, Any]:
    counts = dict.fromkeys(("rows", "unread", "right", "comparable", "wrong", "wrong_paid"), 0)
    seconds: dict[str, list[float]] = {"accuracy": [], "math_verify": []}
    for row in rows:
        gold, reference, numbers = _gold(row), _reference(row), _numbers(row)
        answers = [reference, *numbers]
        sides = {"accuracy": partial(_pays, gold), "math_verify": partial(_equal, reference)}
        order = list(sides) if counts["rows"] % 2 else list(reversed(sides))  # sympy has caches, too
        verdicts = {side: _timed(seconds[side], sides[side], answers) for side in order}
        paid, equal = verdicts["accuracy"], verdicts["math_verify"]
        counts["rows"] += 1
        counts["unread"] += not gold
        counts["right"] += paid[0]
        counts["comparable"] += equal[0]
        counts["wrong"] += len(numbers) - sum(equal[1:])
        wrong = [
            one for one, pays, states in zip(answers, paid, equal, strict=True) if one in numbers and pays > states
        ]
        counts["wrong_paid"] += len(wrong)
        if show and (wrong or not paid[0]):
            print(f"{gold}: {reference}, right: {paid[0]}, wrong that are paid: {wrong}")
    return counts | {"seconds": {side: round(statistics.median(values), 6) for side, values in seconds.items()}}


def _timed(seconds: list[float], compare: Callable[[str], bool], answers: list[str]) -> list[bool]:
    """Return the verdicts, and append the time for one to `seconds`; math-verify's caches are empty at first."""
    for cached in (parser.parse_latex_cached, parser.parse_expr_cached, parser.extract_latex):
        cached.cache_clear()
    start = time.perf_counter()
    verdicts = [compare(answer) for answer in answers[:TIMED]]
    seconds.append((time.perf_counter() - start) / len(verdicts))
    return verdicts + [compare(answer) for answer in answers[TIMED:]]


def _gold(row: dict[str, Any]) -> References:
    return read_row(row | {"answer": row["final_answer"]} if "final_answer" in row else row)


def _reference(row: dict[str, Any]) -> str:
    """Return the answer as a completion would give it: that of the set, without what surrounds it."""
    if "final_answer" in row:
        return ", ".join(row["final_answer"]).replace("$", "").removesuffix(".")
    text = str(row.get("answer", row.get("solution"))).removesuffix(".0")
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return boxes[-1][0] if (boxes := boxed(text)) else text


def _numbers(row: dict[str, Any]) -> list[str]:
    texts = (text for value in row.values() for text in (value if isinstance(value, list) else [value]))
    found = (number for text in texts for number in NUMBER.findall(str(text)))
    return list(dict.fromkeys(found))[:MOST_NUMBERS]


def _pays(gold: References, answer: str) -> bool:
    return verify_answers([gold], [rf"So the answer is \boxed{{{answer}}}."]) == [1.0]


def _equal(reference: str, answer: str) -> bool:
    """Whether math-verify finds them equal, and has read the reference as more than its characters."""
    gold = parse(rf"\boxed{{{reference}}}", parsing_timeout=3)
    given = parse(rf"So the answer is \boxed{{{answer}}}.", parsing_timeout=3)
    return len(gold) > 1 and bool(verify(gold, given, timeout_seconds=3))


if __name__ == "__main__":
    main()
