"""The commands that `grpo convert` sees in a script are those that bash runs; what it cannot know it marks, by line."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_cli.convert.shell import tree
from grpo_cli.convert.shell.script import Command, Script
from grpo_cli.convert.shell.tree import RefusedError

BASH = shutil.which("bash") or "/bin/bash"
SCRIPTS = Path(__file__).parent / "shell_inputs"
LAUNCH = ("trl", "swift", "python3", "torchrun")
_STUB = """#!{bash} -p
printf '%s\\0' $(($# + 1)) "${{0##*/}}" "$@" >> "$RECORD"
"""


def _of_bash(script: str, folder: Path, **variables: str) -> list[list[str]]:
    """The launch commands that bash runs: in an empty folder and environment, with stubs and three pure tools."""
    stubs, work = folder / "stubs", folder / "work"
    stubs.mkdir()
    work.mkdir()
    for name in LAUNCH:
        (stubs / name).write_text(_STUB.format(bash=BASH))
        (stubs / name).chmod(0o755)
    for name in ("expr", "basename", "cat"):
        (stubs / name).symlink_to(str(shutil.which(name)))
    record = folder / "record"
    record.touch()
    environment = {"PATH": str(stubs), "RECORD": str(record), "HOME": "/home/me"} | variables
    subprocess.run(
        [BASH, "--noprofile", "--norc", "-c", script], env=environment, cwd=work, capture_output=True, timeout=20
    )
    words = iter(record.read_text().split("\0")[:-1])
    return [[next(words) for _ in range(int(count))] for count in words]


def _launches(script: Script) -> list[Command]:
    return [command for command in script.commands if command.words[0] in LAUNCH]


def _read(text: str, **variables: str) -> list[list[str]]:
    """The launch commands as `grpo convert` sees them; a mark is shown as the script writes it."""
    script = Script(text, {"HOME": "/home/me"} | variables)
    assert not any(command.condition for command in _launches(script))
    return [[script.shown(word) for word in command.words] for command in _launches(script)]


@pytest.mark.parametrize("script", sorted((SCRIPTS / "said").iterdir()), ids=lambda script: script.stem)
def test_what_a_script_says_is_read_as_bash_runs_it(script: Path, tmp_path: Path) -> None:
    expected = _of_bash(script.read_text(), tmp_path)
    assert expected
    assert _read(script.read_text()) == expected


@pytest.mark.parametrize("script", sorted((SCRIPTS / "unknown").iterdir()), ids=lambda script: script.stem)
def test_what_only_a_run_says_is_marked_and_all_else_is_as_bash_runs_it(script: Path, tmp_path: Path) -> None:
    evaluated = Script(script.read_text(), {"HOME": "/home/me"})
    launches = _launches(evaluated)
    assert any(evaluated.marks_in(command.words) or command.condition for command in launches)
    pattern = "".join(f"(?:{_pattern(command.words)}\n){'?' if command.condition else ''}" for command in launches)
    run = "".join(" ".join(words) + "\n" for words in _of_bash(script.read_text(), tmp_path))
    assert re.fullmatch(pattern, run), (pattern, run)


def _pattern(words: list[str]) -> str:
    """A mark may be any text, also several words or none."""
    patterns = [".*".join(map(re.escape, re.split("\ue000\\d+\ue001", word))) for word in words]
    return patterns[0] + "".join("(?: .*)?" if pattern == ".*" else f" {pattern}" for pattern in patterns[1:])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("A=1\neval trl $A", "line 2: eval is not read: write the command itself"),
        ("\ndeclare -A MAP=([a]=b)\ntrl", "line 2: declare -A is not read"),
        ("while true; do\n  sleep 1\ndone\ntrl", "line 1: this loop does not end"),
        ("i=0\nwhile true; do i=$((i + 1)); done", "line 2: this loop does not end"),
        ("f() {\n f; }\nf", "line 2: f calls itself without end"),
        ("A=x\nwhile true; do\n A=$A$A\ndone", "line 3: the variable A grows without end"),
        ("IFS=,\ntrl", "line 1: a script that sets IFS for all that follows is not read"),
        ("select x in a; do :; done", "line 1: select is not read"),
        ("trl 'open", "line 1: reached EOF without closing quote `'`"),
        ("for i in 1 2; do break 2; done", "line 1: break 2 is not read"),
    ],
)
def test_what_cannot_be_read_is_refused_by_line(text: str, complaint: str) -> None:
    with pytest.raises(RefusedError, match="^" + re.escape(complaint)):
        Script(text)


def test_a_mark_has_the_line_and_the_reason() -> None:
    script = Script("A=1\nN=$(nproc)\ntrl --gpus $N --model $MODEL\n")
    (command,) = script.commands
    marks = [(mark.line, mark.text, mark.why) for mark in script.marks_in(command.words)]
    assert marks == [(2, "$(nproc)", "commands are not run"), (3, "$MODEL", "MODEL is not set in the script")]


def test_variables_that_are_given_fill_those_that_the_script_does_not_set() -> None:
    text = "LR=1e-6\nN=$(nproc)\nG=${G:-8}\nif [ $N -gt 4 ]; then B=2; else B=1; fi\ntrl $MODEL $N $LR $G $B $1"
    script = Script(text, {"MODEL": "a/b", "N": "8", "LR": "5", "G": "16", "1": "first"})
    assert [command.words for command in script.commands] == [["trl", "a/b", "8", "1e-6", "16", "2", "first"]]
    assert script.used == {"MODEL", "N", "G", "1"}, "the script sets LR itself"


def test_what_a_sourced_file_may_set_is_not_known() -> None:
    script = Script("source activate x\nA=${A:-1}\n. env.sh\ntrl $A ${B:-2}")
    (command,) = script.commands
    assert command.words[:2] == ["trl", "1"]
    assert [mark.why for mark in script.marks_in(command.words)] == ["B may be set: line 3 reads env.sh"]
    assert script.sourced == [(3, "env.sh")]


def test_variables_before_a_command_and_of_env_are_its_own() -> None:
    script = Script("export A=1 B=$(date)\nC=2 trl x\nexec env D=3 swift y")
    first, second = script.commands
    assert (first.environment["A"], first.environment["C"]) == ("1", "2")
    assert (second.words, second.environment["D"], "C" in second.environment) == (["swift", "y"], "3", False)


def test_jobs_have_no_npu() -> None:
    asks = "$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)"
    script = Script(f'D=${{D:-{asks}}}\ncase "$D" in gpu) B=1 ;; npu) B=2 ;; esac\ntrl $D $B')
    assert [command.words for command in script.commands] == [["trl", "gpu", "1"]]


def test_without_shfmt_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_shfmt", lambda: None)
    with pytest.raises(RefusedError, match=r"pip install 'grpo-operator\[cli\]'"):
        Script("trl")
