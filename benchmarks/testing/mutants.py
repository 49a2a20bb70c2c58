"""Count the faults that unit tests catch: each mutant is one small change of the code, for which some test must fail.

cosmic-ray makes the mutants, a seeded sample for each module; two more kinds are ours: a statement or a guard removed.
It and coverage are in an environment of their own, as they are no dependency of the project:

    python -m venv ~/.cache/grpo-operator/mutants
    ~/.cache/grpo-operator/mutants/bin/pip install cosmic-ray==8.7.0 coverage==7.17.5
    nice python -m benchmarks.testing.mutants --tools ~/.cache/grpo-operator/mutants --output mutants.jsonl [ROOM...]

The tests of a room are collected once. A mutant lives in a fork of that process, which replaces the code of functions
in place, or constants of the module, and runs the tests that execute its line, the shortest first; all of the room's
if none does in that process. Not mutated are annotations, classes outside of methods, and imports. Processes that a
test starts with its sys.path import the mutant from a copy of the packages; others run without it, so what only they
would find counts as survived. A run tries again what survived in the last one.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
import pytest

from benchmarks.testing.grafts import graft

ROOT = Path(__file__).parents[2]
UNIT, WORKLOAD = "tests/unit/workload", "workload/grpo_workload"
ROOMS = {  # name: (modules, their tests)
    "algorithm": (
        [f"{WORKLOAD}/algorithm/*.py"],
        [f"{UNIT}/algorithm", f"{UNIT}/training/test_r*.py"]
        + [f"{UNIT}/policy/test_{name}.py" for name in ("penalties", "own_loss", "entropy_cut", "vision")],
    ),
    "rewards": (
        [
            f"{WORKLOAD}/rewards/{name}.py"
            for name in ("answer_in_text", "arithmetic", "builtin", "math_answers", "math_verdict", "scoring", "table")
        ],
        [f"{UNIT}/rewards"],
    ),
    "journal": (
        [
            *[f"{WORKLOAD}/storage/journal.py", f"{WORKLOAD}/storage/group_record.py"],
            *[f"{WORKLOAD}/training/begin_batch.py", f"{WORKLOAD}/training/sampling.py"],
        ],
        [f"{UNIT}/storage/test_journal.py", f"{UNIT}/training"],
    ),
    "weights": (
        [f"{WORKLOAD}/weights/{name}.py" for name in ("wire", "export", "buckets", "differ", "digest")]
        + [
            f"{WORKLOAD}/generation/{name}.py"
            for name in ("writes", "copies", "arrivals", "audit", "derived", "reload")
        ],
        [f"{UNIT}/weights"]
        + [f"{UNIT}/generation/test_{name}.py" for name in ("derived", "reload", "writes")]
        + [f"{UNIT}/policy/test_{name}.py" for name in ("checkpoint_names", "adapter_weights")],
    ),
    "decide": (["operator/grpo_operator/decide/*.py"], ["tests/unit/operator/decide"]),
}
OPERATORS = (
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("NumberReplacer", "ZeroIterationForLoop", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ExceptionReplacer", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub"),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_Gt", "LtE_Gt", "Gt_Lt", "GtE_Lt", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Mod_Mul", "BitOr_BitAnd", "BitAnd_BitOr", "Pow_Mul")),
)
SECONDS = 20  # of a processor, beyond three times what the tests take without a mutant


def _files(room: str) -> list[str]:
    """Return a room's tests."""
    return [str(path) for pattern in ROOMS[room][1] for path in sorted(ROOT.glob(pattern))]


class Mutant(NamedTuple):
    """A module with one change."""

    line: int
    operator: str
    occurrence: int
    text: str  # of the whole module


def mutants(source: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    plugins, mutating = (importlib.import_module(f"cosmic_ray.{name}") for name in ("plugins", "mutating"))
    tree, lines = ast.parse(source), source.splitlines()
    skipped = _skipped(tree)
    for name in OPERATORS:
        operator = plugins.get_operator(f"core/{name}")()
        for number, (line, column) in enumerate(_positions(importlib.import_module("parso").parse(source), operator)):
            if not any(start <= (line, column) < end for start, end in skipped):
                yield Mutant(line, name, number, mutating.mutate_code(source, operator, number))
    for number, (node, replaced) in enumerate(_removals(tree)):
        if node.lineno == node.end_lineno and not any(a <= (node.lineno, node.col_offset) < b for a, b in skipped):
            line = lines[node.lineno - 1].encode()
            text = (line[: node.col_offset] + replaced.encode() + line[node.end_col_offset :]).decode()
            whole = "\n".join([*lines[: node.lineno - 1], text, *lines[node.lineno :]]) + "\n"
            yield Mutant(node.lineno, "RemoveGuard" if replaced != "pass" else "RemoveStatement", number, whole)


def _positions(node: Any, operator: Any) -> Iterator[tuple[int, int]]:
    """Yield where an operator can mutate, in the order of cosmic-ray's occurrences."""
    yield from (start for start, _ in operator.mutation_positions(node))
    for child in getattr(node, "children", ()):
        yield from _positions(child, operator)


def _skipped(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where no mutant would do anything, or the graft of it would not."""
    nodes: list[Any] = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert)]
    for node in ast.walk(tree):
        nodes += [one for one in (getattr(node, "annotation", None), getattr(node, "returns", None)) if one]
        if isinstance(node, ast.ClassDef):
            nodes += [one for one in node.body if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        nodes += getattr(node, "decorator_list", [])
    return [((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)) for one in nodes]


def _removals(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Yield statements and guards that can be removed, with what takes their place."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                yield node, "pass"
            case ast.If(test=test, orelse=[]):
                yield test, "False"
            case ast.BoolOp(op=op, values=values):
                yield from ((value, "True" if isinstance(op, ast.And) else "False") for value in values)


class Catch:
    """A plugin of pytest: it runs the tests once for their coverage, then for each mutant in a fork."""

    def __init__(self, room: str, count: int, seed: int, output: Path) -> None:
        self._room, self._count, self._seed, self._output = room, count, seed, output
        self._failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the first test that failed."""
        if report.failed:
            self._failed = self._failed or report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run everything."""
        paths = [path for pattern in ROOMS[self._room][0] for path in sorted(ROOT.glob(pattern))]
        known = rows(self._output)
        executed, seconds = self._cover(session.items, paths)
        for path in paths:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
            if name not in sys.modules or path.name == "__init__.py":
                continue
            every = list(mutants(path.read_text()))
            chosen = random.Random(f"{self._seed} {name}").sample(every, min(self._count, len(every)))
            for mutant in sorted(chosen):
                row = {"room": self._room, "module": name, **mutant._asdict()}
                del row["text"]
                if any(row.items() <= one.items() for one in known):
                    continue
                lines = executed[str(path)]
                asked = sorted(lines.get(mutant.line) or session.items, key=lambda item: seconds[item])
                limit = 3 * sum(seconds[item] for item in asked) + SECONDS
                with tempfile.TemporaryDirectory() as folder:  # anew each time: no bytecode of another mutant
                    root = path.relative_to(ROOT).parts[0]
                    shutil.copytree(ROOT / root, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pyc"))
                    (Path(folder) / path.relative_to(ROOT / root)).write_text(mutant.text)
                    result, test = self._try(sys.modules[name], mutant, asked, limit, folder)
                with self._output.open("a") as file:
                    file.write(json.dumps({**row, "result": result, "test": test}) + "\n")
        return True

    def _cover(self, items: list[pytest.Item], paths: list[Path]) -> tuple[Any, dict[pytest.Item, float]]:
        """Return the tests that execute each line of each file, and the seconds of a processor that each takes."""
        coverage = importlib.import_module("coverage").Coverage(data_file=None, include=[str(path) for path in paths])
        seconds = {}
        coverage.start()
        for number, item in enumerate(items):
            coverage.switch_context(str(number))
            before = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            seconds[item] = time.process_time() - before
            assert not self._failed, f"{self._failed} fails without a mutant"
        coverage.stop()
        executed: Any = defaultdict(dict)
        for path in map(str, paths):
            for line, contexts in coverage.get_data().contexts_by_lineno(path).items():
                executed[path][line] = {items[int(number)] for number in contexts if number}
        return executed, seconds

    def _try(self, module: ModuleType, mutant: Mutant, items: list[Any], limit: float, folder: str) -> tuple[str, str]:
        """Return what becomes of a mutant, which `folder` has too, and the test that killed it."""
        read, write = os.pipe()
        if not (child := os.fork()):
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            try:
                graft(module, mutant.text, mutant.line)
                sys.path.insert(0, folder)
                for item in items:
                    item._initrequest()  # as pytest-rerunfailures does
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if self._failed:
                        break
            except BaseException as error:  # such a mutant cannot be missed
                self._failed = f"{type(error).__name__} outside of tests"
            os.write(write, (self._failed or "-").encode())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(child, 0)
        return ("survived", "") if said == "-" else ("killed", said) if said else ("timeout", "")


def rows(output: Path) -> list[dict[str, Any]]:
    """Return what a file of results has."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


@click.command(help=__doc__)
@click.argument("rooms", nargs=-1)
@click.option("--tools", type=click.Path(path_type=Path), required=True, help="environment of cosmic-ray and coverage")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--count", default=8, help="mutants of a module")
@click.option("--seed", default=1)
def main(rooms: tuple[str, ...], tools: Path, output: Path, count: int, seed: int) -> None:
    """Try mutants of rooms, but for those that `output` has as killed."""
    sys.path += map(str, tools.expanduser().glob("lib/python*/site-packages"))  # last: the project's own come first
    known = rows(output)
    settled = [one for one in known if one["result"] != "survived" or "no_fault" in one]
    kept = [one for one in known if one in settled or one["room"] not in (rooms or ROOMS)]
    output.write_text("".join(json.dumps(row) + "\n" for row in kept))
    for room in rooms or ROOMS:
        if not os.fork():  # rooms do not share imports
            flags = ["-q", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "--timeout=0"]
            os._exit(pytest.main([*flags, *_files(room)], plugins=[Catch(room, count, seed, output)]))
        _, status = os.wait()
        if status:
            raise click.ClickException(f"the tests of {room} fail or cannot be run")


if __name__ == "__main__":
    main()
