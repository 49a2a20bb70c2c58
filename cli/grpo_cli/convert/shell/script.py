"""Commands of a script, with their words and variables, as far as the script itself says them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_cli.convert.shell.conditions import calculate
from grpo_cli.convert.shell.flow import Flow
from grpo_cli.convert.shell.state import Break, Exit, Return, Stop, Value, is_known
from grpo_cli.convert.shell.tree import Node, RefusedError, parse

# Commands that change nothing that a script can see; `_pure` knows what some of them print.
_QUIET = re.compile(
    r":|cd|mkdir|set|shopt|ulimit|trap|wait|sleep|rm|touch|alias|pushd|popd|umask|hash|type|chmod|module|echo|printf"
)
_ASKS_FOR_AN_NPU = re.compile(r"python3? -c import torch_npu;?")  # a job's GPUs are NVIDIA's: it is not there
_SETS_UP_A_SHELL = {"activate", "conda.sh", ".bashrc", ".bash_profile", ".profile"}
_NAME = re.compile(r"[A-Za-z_]\w*")
_MAX_DEPTH = 20  # of calls


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a script runs, or may run."""

    line: int
    words: list[str]
    environment: dict[str, str]
    condition: int | None  # the line of a condition that is not known, under which it stands


class Script(Flow):
    """A script, evaluated: its commands, and marks for what they do not say."""

    def __init__(self, text: str, given: Mapping[str, str] | None = None) -> None:
        """Evaluate `text` with variables that are `given`. Raises RefusedError naming the line that is not read."""
        super().__init__(text.encode(), dict(given or {}))
        self.commands: list[Command] = []
        self.sourced: list[tuple[int, str]] = []  # files whose variables are not known
        self.ended: int | None = None  # the line of an `exit`
        self._locals: dict[str, Value | None] | None = None  # variables to restore after the function
        self._printed_under: tuple[int | None, int] = (None, 0)  # conditions around that $(...)
        self._depth = self._substitutions = 0
        self._kinds |= {"CallExpr": self._call, "DeclClause": self._declare}
        try:
            self._block(parse(self._source).get("Stmts"))
        except Exit as stop:
            self.ended = stop.line
        except Stop:
            pass
        except RecursionError:
            raise RefusedError(f"line {self._at}: nested too deeply") from None
        except RefusedError as error:
            named = str(error).startswith("line ") or self._steps == 0
            raise error if named else RefusedError(f"line {self._at}: {error}") from None

    # Commands

    def _declare(self, cmd: Node) -> bool | None:
        variant, flags = cmd["Variant"]["Value"], set()
        for argument in cmd.get("Args") or []:
            text = "" if "Name" in argument else self.word(argument["Value"])
            found = re.match(rf"({_NAME.pattern})=(.*)$", text, re.DOTALL)
            name = argument["Name"]["Value"] if "Name" in argument else found[1] if found else ""
            if name and self._locals is not None and variant in ("local", "declare", "typeset"):
                self._locals.setdefault(name, self.state.variables.get(name))
            if found:
                self.put(name, found[2])
            elif name and not argument.get("Naked"):
                self.assign(argument)
            elif name and self._locals is not None and variant != "export":
                self.state.variables.pop(name, None)
            elif text.startswith("-"):
                flags |= set(text[1:])
            elif not name:
                self.state.sourced = self.state.sourced or f"line {self._at} exports more"
            if name and (variant == "export" or "x" in flags):
                self.state.exported.add(name)
        if flags & set("Ainul"):
            raise RefusedError(f"{variant} -{''.join(sorted(flags))} is not read")
        return True

    def _call(self, cmd: Node) -> bool | None:
        assigns, before, substituted = cmd.get("Assigns") or [], len(self.marks), self._substitutions
        words = [word for argument in cmd.get("Args") or [] for word in self.fields(argument)]
        if not words:
            for node in assigns:
                self.assign(node)
            is_sure = all(mark.is_unset for mark in self.marks[before:]) and self._substitutions == substituted
            return True if is_sure else None  # else it has the status of $(...)
        own = {node["Name"]["Value"]: self.word(node["Value"]) if node.get("Value") else "" for node in assigns}
        if words[0] in self._functions:
            return self._function(words, own)
        return self._command(words, own)

    def _function(self, words: list[str], own: dict[str, str]) -> bool | None:
        if self._depth >= _MAX_DEPTH:
            raise RefusedError(f"{words[0]} calls itself without end")
        arguments, outer, since = self.state.arguments, self._locals, len(self._early)
        self._locals = {name: self.state.variables.get(name) for name in own}
        self.state.variables |= own
        self.state.arguments = self.unsure(words[1:])
        self._depth += 1
        status: bool | None = None
        try:
            status = self._stmt(self._functions[words[0]])
        except Return as stop:
            status = stop.status
        finally:
            self._depth -= 1
            if self._join(Return, since):
                status = None
            self.state.arguments = arguments
            for name, value in self._locals.items():
                self.state.variables.pop(name, None)
                if value is not None:
                    self.state.variables[name] = value
            self._locals = outer
        return status

    def _command(self, words: list[str], own: dict[str, str]) -> bool | None:
        """Do what a builtin does to the state or the course, or note another command."""
        name, *rest = words
        state = self.state
        match name:
            case "true" | "false":
                return name == "true"
            case "[" | "test":
                return self.classic(rest[:-1] if name == "[" else rest)
            case "exit":
                raise Exit(self._at)
            case "return":
                raise Return(self._at, rest == ["0"] if rest and rest[0].isdigit() else None)
            case "break" | "continue":
                if rest not in ([], ["1"]):
                    raise RefusedError(f"{name} {rest[0]} is not read")
                raise Break(self._at, kind=name)
            case "set" if "--" in rest:
                state.arguments = self.unsure(rest[rest.index("--") + 1 :])
            case "shift":
                count = rest[0] if rest else "1"
                is_sure = count.isdigit() and is_known(state.arguments[: int(count)])
                state.arguments = (
                    state.arguments[int(count) :] if is_sure else [self.mark_line(self._at, "$@", "shift is not known")]
                )
            case "unset":
                for variable in rest:
                    if _NAME.fullmatch(variable):
                        state.variables.pop(variable, None)
                    elif found := _NAME.match(variable):
                        self.put(found[0], self.mark_line(self._at, variable, "unset of an element is not read"))
            case "eval":
                raise RefusedError("eval is not read: write the command itself")
            case "read" if "-d" in rest and self._document is not None:
                self.put(rest[-1], self.document(self._document).strip(" \t\n"))
                return None
            case "read" | "mapfile" | "readarray" | "getopts":
                for variable in [word for word in rest if _NAME.fullmatch(word)] or ["REPLY"]:
                    self.put(variable, self.mark_line(self._at, f"${variable}", f"{name} reads it"))
                return None
            case "source" | ".":
                file = " ".join(rest)
                if file.rsplit("/", 1)[-1].split(" ")[0] not in _SETS_UP_A_SHELL:
                    self.sourced.append((self._at, self.shown(file)))
                    state.sourced = state.sourced or f"line {self._at} reads {self.shown(file)}"
            case "exec" if not rest:
                pass
            case _:
                return self._other(words, own)
        return True

    def _other(self, words: list[str], own: dict[str, str]) -> bool | None:
        name = words[0]
        if _ASKS_FOR_AN_NPU.fullmatch(" ".join(words)):
            return False
        if self._printed is not None and (self._condition, len(self._early)) == self._printed_under:
            known = self._pure(words)
            if known is not None:
                self._printed.append(known)
                return True
        if _QUIET.fullmatch(name):
            if name == "printf" and words[1:2] == ["-v"]:
                self.put(words[2], self.mark_line(self._at, f"${words[2]}", "printf sets it"))
            if name not in (":", "set"):
                self._print(None)
            return True
        is_exec = name == "exec"
        words = words[1:] if is_exec else words
        if words[0] == "env":
            words = words[1:]
            while words and (found := re.match(rf"({_NAME.pattern})=(.*)$", words[0], re.DOTALL)):
                own, words = own | {found[1]: found[2]}, words[1:]
        values = ((name, self.state.variables.get(name, "")) for name in sorted(self.state.exported))
        exported = {name: value for name, value in values if isinstance(value, str)}
        condition = self._condition or (self._early[-1][2] if self._early else None)
        self.commands.append(Command(self._at, words, exported | own, condition))
        if is_exec:
            raise Exit(self._at)
        return None

    # What $(...) prints

    def printed(self, node: Node) -> str:
        """Return what `_pure` knows to be printed; a mark where a command would have to run."""
        kept, count, at = (self._printed, self._printed_under), len(self.commands), self._at
        self._printed, self._printed_under = [], (self._condition, len(self._early))
        self._substitutions += 1
        try:
            self._apart(lambda: self._block(node.get("Stmts")))
        except Stop:
            self._print(None)
        known = [line for line in self._printed if line is not None]
        is_all = len(known) == len(self._printed) and len(self.commands) == count
        (self._printed, self._printed_under), self._at = kept, at
        del self.commands[count:]
        return "\n".join(known).rstrip("\n") if is_all else self.mark(node, "commands are not run")

    def _pure(self, words: list[str]) -> str | None:
        """The output of commands that are the same on all machines."""
        match words:
            case ["echo", "-n" | "-e" | "-E" | "-ne" | "-en", *_]:
                return None
            case ["echo", *rest]:
                return " ".join(rest)
            case ["cat"] if self._document is not None:
                return self.document(self._document).rstrip("\n")
            case ["basename", path] if is_known(path) and path.strip("/"):
                return path.rstrip("/").rsplit("/", 1)[-1]
            case ["expr", first, ("+" | "-" | "*" | "/" | "%") as op, second] if first.isdigit() and second.isdigit():
                result = calculate(op, int(first), int(second))
                return None if result is None else str(result)
        return None
