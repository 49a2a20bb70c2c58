"""`grpo` lists and completes its commands without importing them; `--help` of a command imports nothing slow."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from grpo_cli.main import COMMANDS, main

SLOW = {"kubernetes", "rich", "plotext", "aiohttp", "pydantic", "urllib3", "yaml", "grpo_workload"}


def modules_after(*arguments: str, **environment: str) -> set[str]:
    """Modules that are loaded when `grpo` with these arguments ends."""
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    code += "from grpo_cli.main import main; main(prog_name='grpo')"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", code, *arguments]
    return set(subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60).stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_imports_nothing_slow(command: str) -> None:
    loaded = modules_after(command, "--help")
    assert COMMANDS[command].module in loaded
    assert loaded & SLOW == set()


def test_the_list_of_commands_imports_none_of_them() -> None:
    completing = modules_after(_GRPO_COMPLETE="bash_complete", COMP_WORDS="grpo ", COMP_CWORD="1")
    for loaded in (completing, modules_after("--help")):
        assert "grpo_cli.main" in loaded
        assert loaded & (SLOW | {entry.module for entry in COMMANDS.values()}) == set()


def test_completing_an_option_imports_nothing_slow() -> None:
    loaded = modules_after(_GRPO_COMPLETE="bash_complete", COMP_WORDS="grpo status --con", COMP_CWORD="2")
    assert COMMANDS["status"].module in loaded
    assert loaded & SLOW == set()


def test_the_line_of_each_command_is_the_first_of_its_help() -> None:
    context = click.Context(main)
    for name, entry in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert (command.help or "").startswith(f"{entry.help}.\n"), name


def test_paragraphs_of_help_are_not_indented() -> None:
    help_ = CliRunner().invoke(main, ["diagnose", "--help"]).output
    assert "\n  The archive has the job's objects" in help_
