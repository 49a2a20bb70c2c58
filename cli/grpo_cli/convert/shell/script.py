"""Commands of a script, with their words and variables, as far as the script itself says them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from grpo_cli.convert.shell.conditions import Conditions, calculate
from grpo_cli.convert.shell.tree import Node, RefusedError, parse
from grpo_cli.convert.shell.words import State, Value, is_known, matches

# Commands that change nothing that a script can see; `_pure` knows what some of them print.
_QUIET = re.compile(
    r":|cd|mkdir|set|shopt|ulimit|trap|wait|sleep|rm|touch|alias|pushd|popd|umask|hash|type|chmod|module|echo|printf"
)
_SETS_UP_A_SHELL = {"activate", "conda.sh", ".bashrc", ".bash_profile", ".profile"}
_NAME = re.compile(r"[A-Za-z_]\w*")
_MAX_STEPS, _MAX_DEPTH = 20_000, 20
_Run = Callable[[], bool | None]


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a script runs, or may run."""

    line: int
    words: list[str]
    environment: dict[str, str]
    condition: int | None  # the line of a condition that is not known, under which it stands


class _Stop(Exception):  # noqa: N818 - no error: what ends a block early
    def __init__(self, line: int, status: bool | None = None, kind: str = "") -> None:
        self.line, self.status, self.kind = line, status, kind


class _Exit(_Stop):
    pass


class _Return(_Stop):
    pass


class _Break(_Stop):
    pass


class Script(Conditions):
    """A script, evaluated: its commands, and marks for what they do not say."""

    def __init__(self, text: str, given: Mapping[str, str] | None = None) -> None:
        """Evaluate `text` with variables that are `given`. Raises RefusedError naming the line that is not read."""
        super().__init__(text.encode(), dict(given or {}))
        self.commands: list[Command] = []
        self.sourced: list[tuple[int, str]] = []  # files whose variables are not known
        self.ended: int | None = None  # the line of an `exit`
        self._functions: dict[str, Node] = {}
        self._locals: dict[str, Value | None] | None = None  # variables to restore after the function
        self._early: list[tuple[_Stop, State, int]] = []  # ends of blocks under conditions that are not known
        self._condition: int | None = None
        self._printed: list[str | None] | None = None  # within $(...); None: not known
        self._printed_under: int | None = None
        self._document: Node | None = None  # a here-document
        self._steps = self._depth = 0
        self._at = 1
        try:
            self._block(parse(self._source).get("Stmts"))
        except _Exit as stop:
            self.ended = stop.line
        except _Stop:
            pass
        except RecursionError:
            raise RefusedError(f"line {self._at}: nested too deeply") from None
        except RefusedError as error:
            named = str(error).startswith("line ") or self._steps == 0
            raise error if named else RefusedError(f"line {self._at}: {error}") from None

    def _step(self, line: int) -> None:
        self._at = line
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise RefusedError("this loop does not end")

    # Statements: True, False, or None where the status is not known

    def _block(self, stmts: list[Node] | None) -> bool | None:
        status: bool | None = True
        for stmt in stmts or []:
            status = self._stmt(stmt)
        return status

    def _stmt(self, stmt: Node) -> bool | None:
        self._step(self.line(stmt))
        redirects, cmd = stmt.get("Redirs") or [], stmt.get("Cmd")
        if cmd is None:
            self._print(None)
            return True
        self._document = next((redirect for redirect in redirects if "Hdoc" in redirect), None)
        # Output that goes to a file or to stderr is not what $(...) prints.
        elsewhere = any(
            redirect["Op"] in (">", ">>", ">|", "&>", "&>>", ">&") and redirect.get("N", {"Value": "1"})["Value"] == "1"
            for redirect in redirects
        )
        kept = self._printed
        self._printed = [] if elsewhere and kept is not None else kept
        status = self._apart(lambda: self._run(cmd)) if stmt.get("Background") else self._run(cmd)
        self._printed = kept
        return status if status is None or not stmt.get("Negated") else not status

    def _run(self, cmd: Node) -> bool | None:
        match cmd["Type"]:
            case "CallExpr":
                return self._call(cmd)
            case "DeclClause":
                return self._declare(cmd)
            case "Block":
                return self._block(cmd["Stmts"])
            case "Subshell":
                return self._apart(lambda: self._block(cmd["Stmts"]))
            case "TimeClause":
                return self._stmt(cmd["Stmt"]) if "Stmt" in cmd else True
            case "TestClause":
                return self.test(cmd["X"])
            case "ArithmCmd" | "LetClause":
                values = [self.arithmetic(node) for node in (cmd.get("Exprs") or [cmd["X"]])]
                return None if values[-1] is None else values[-1] != 0
            case "FuncDecl":
                self._functions[cmd["Name"]["Value"]] = cmd["Body"]
                return True
            case "BinaryCmd":
                return self._pair(cmd)
            case "IfClause":
                return self._if(cmd)
            case "CaseClause":
                return self._case(cmd)
            case "WhileClause":
                return self._loop(cmd, lambda: self._while_status(cmd))
            case "ForClause":
                return self._for(cmd)
        raise RefusedError(f"{cmd['Type']} is not read")

    def _apart(self, run: _Run) -> bool | None:
        """A subshell: its variables go with it."""
        kept, self.state = self.state, copy.deepcopy(self.state)
        try:
            return run()
        except _Exit:
            return None
        finally:
            self.state = kept

    def _pair(self, cmd: Node) -> bool | None:
        if cmd["Op"] in ("|", "|&"):
            kept, self._printed = self._printed, None if self._printed is None else []
            self._apart(lambda: self._stmt(cmd["X"]))
            self._printed = kept
            return self._apart(lambda: self._stmt(cmd["Y"]))
        status = self._stmt(cmd["X"])
        if status is None:
            return self._fork(self.line(cmd), [lambda: self._stmt(cmd["Y"]), lambda: None])
        return self._stmt(cmd["Y"]) if status == (cmd["Op"] == "&&") else status

    def _if(self, cmd: Node) -> bool | None:
        if not cmd.get("Cond"):  # else
            return self._block(cmd.get("Then"))

        def otherwise() -> bool | None:
            return self._if(cmd["Else"]) if "Else" in cmd else True

        status = self._block(cmd["Cond"])
        if status is None:
            return self._fork(self.line(cmd), [lambda: self._block(cmd.get("Then")), otherwise])
        return self._block(cmd.get("Then")) if status else otherwise()

    def _case(self, cmd: Node) -> bool | None:
        text, items = self.plain(self.word(cmd["Word"])), cmd.get("Items") or []
        for number, item in enumerate(items):
            if item["Op"] != ";;":
                raise RefusedError(f"{item['Op']} in a case is not read")
            found = [matches(text, self.plain(self.pattern(pattern))) for pattern in item["Patterns"]]
            if True in found:
                return self._block(item.get("Stmts"))
            if None in found:
                rest = [partial(self._block, item.get("Stmts")) for item in items[number:]]
                return self._fork(self.line(cmd), [*rest, lambda: None])
        return True

    # Conditions that are not known

    def _fork(self, line: int, branches: Sequence[_Run]) -> bool | None:
        """Run all branches of a condition; variables on which they differ are not known afterwards."""
        before, outer, first = self.state, self._condition, len(self._early)
        ends: list[State] = []
        stops: list[_Stop] = []
        self._condition = outer or line
        for branch in branches:
            self.state = copy.deepcopy(before)
            try:
                branch()
                ends.append(self.state)
            except _Stop as stop:  # after an exit there is nothing left to know
                stops.append(stop)
                if not isinstance(stop, _Exit):
                    self._early.append((stop, self.state, line))
        self._condition = outer
        if ends:
            self.state = self._merged(ends, line)
            return None
        if len(self._early) > first:
            early, self.state, _ = self._early.pop()
            raise early
        self.state = before
        raise stops[0]

    def _merged(self, states: list[State], line: int) -> State:
        self.state, why = states[0], f"it depends on line {line}, which only a run decides"
        for name in sorted(set().union(*(state.variables for state in states))):
            values = [state.variables.get(name) for state in states]
            if all(value == values[0] for value in values):
                continue
            unknown = self.mark_line(line, f"${name}", why)
            lists = [value for value in values if isinstance(value, list)]
            if len(lists) == len(values):  # what all begin with is known
                shared = takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))
                self.put(name, [*(words[0] for words in shared), unknown])
            else:
                self.put(name, unknown)
        if any(state.arguments != states[0].arguments for state in states):
            self.state.arguments = [self.mark_line(line, "$@", why)]
        self.state.exported = set().union(*(state.exported for state in states))
        self.state.sourced = next((state.sourced for state in states if state.sourced), "")
        return self.state

    def _join(self, kind: type[_Stop], since: int) -> None:
        """Take into account that the block may have ended early, by a `return` or `break` of `kind`."""
        for entry in self._early[since:]:
            if isinstance(entry[0], kind):
                self._early.remove(entry)
                self.state = self._merged([self.state, entry[1]], entry[2])

    # Loops

    def _while_status(self, cmd: Node) -> bool | None:
        status = self._block(cmd["Cond"])
        return status if status is None else status != bool(cmd.get("Until"))

    def _loop(self, cmd: Node, condition: _Run, after: Callable[[], object] = lambda: None) -> bool | None:
        since, before = len(self._early), None
        while True:
            self._step(self.line(cmd))
            status = condition()
            if status is None:
                self._fork(self.line(cmd), [lambda: self._body(cmd), lambda: None])
            if not status:
                break
            before = copy.deepcopy(self.state)
            if self._body(cmd):
                break
            after()
            if self.state == before:
                if len(self._early) > since:  # a `break` that only a run decides
                    break
                raise RefusedError(f"line {self.line(cmd)}: this loop does not end")
        self._join(_Break, since)
        return None

    def _body(self, cmd: Node) -> bool:
        """Run the body of a loop once; return whether a `break` ended the loop."""
        try:
            self._block(cmd["Do"])
        except _Break as stop:
            return stop.kind == "break"
        return False

    def _for(self, cmd: Node) -> bool | None:
        if cmd.get("Select"):
            raise RefusedError("select is not read")
        loop, since = cmd["Loop"], len(self._early)
        if loop["Type"] == "CStyleLoop":
            if "Init" in loop:
                self.arithmetic(loop["Init"])

            def condition() -> bool | None:
                value = self.arithmetic(loop["Cond"]) if "Cond" in loop else 1
                return None if value is None else value != 0

            return self._loop(cmd, condition, lambda: self.arithmetic(loop["Post"]) if "Post" in loop else None)
        written = loop.get("Items") or []
        is_in = "InPos" in loop
        values = [word for item in written for word in self.fields(item)] if is_in else list(self.state.arguments)
        for value in values:

            def turn(value: str = value) -> bool:
                self.put(loop["Name"]["Value"], value)
                return self._body(cmd)

            self._step(self.line(cmd))
            if not is_known(value):  # it may stand for several words, or none
                self._fork(self.line(cmd), [turn, lambda: None])
            elif turn():
                break
        self._join(_Break, since)
        return None

    # Commands

    def _declare(self, cmd: Node) -> bool | None:
        variant, flags = cmd["Variant"]["Value"], set()
        for argument in cmd.get("Args") or []:
            if "Name" not in argument:
                text = self.word(argument["Value"])
                if text.startswith("-"):
                    flags |= set(text[1:])
                elif found := re.match(rf"({_NAME.pattern})=(.*)$", text, re.DOTALL):
                    self._set(variant, found[1], found[2])
                else:
                    self.state.sourced = self.state.sourced or f"line {self._at} exports more"
                continue
            name = argument["Name"]["Value"]
            self._own(variant, name)
            if not argument.get("Naked"):
                self.assign(argument)
            elif self._locals is not None and variant != "export":
                self.state.variables.pop(name, None)
            if variant == "export" or "x" in flags:
                self.state.exported.add(name)
        if flags & set("Ainul"):
            raise RefusedError(f"{variant} -{''.join(sorted(flags))} is not read")
        return True

    def _own(self, variant: str, name: str) -> None:
        if self._locals is not None and variant in ("local", "declare", "typeset"):
            self._locals.setdefault(name, self.state.variables.get(name))

    def _set(self, variant: str, name: str, value: str) -> None:
        self._own(variant, name)
        self.put(name, value)
        if variant == "export":
            self.state.exported.add(name)

    def _call(self, cmd: Node) -> bool | None:
        assigns, before = cmd.get("Assigns") or [], len(self.marks)
        words = [word for argument in cmd.get("Args") or [] for word in self.fields(argument)]
        if not words:
            for node in assigns:
                self.assign(node)
            return True if all(mark.is_unset for mark in self.marks[before:]) else None
        own = {node["Name"]["Value"]: self.word(node["Value"]) if node.get("Value") else "" for node in assigns}
        if words[0] in self._functions:
            return self._function(words, own)
        known, status = self._builtin(words)
        if known:
            return status
        return self._other(words, own)

    def _function(self, words: list[str], own: dict[str, str]) -> bool | None:
        if self._depth >= _MAX_DEPTH:
            raise RefusedError(f"{words[0]} calls itself without end")
        arguments, outer, since = self.state.arguments, self._locals, len(self._early)
        self._locals = {name: self.state.variables.get(name) for name in own}
        self.state.variables |= own
        self.state.arguments = words[1:]
        self._depth += 1
        try:
            status = self._stmt(self._functions[words[0]])
        except _Return as stop:
            status = stop.status
        finally:
            self._depth -= 1
            self._join(_Return, since)
            self.state.arguments = arguments
            for name, value in self._locals.items():
                self.state.variables.pop(name, None)
                if value is not None:
                    self.state.variables[name] = value
            self._locals = outer
        return status

    def _builtin(self, words: list[str]) -> tuple[bool, bool | None]:
        """Whether it is one that changes the state or the course; and its status."""
        name, *rest = words
        state = self.state
        match name:
            case "true" | "false":
                return True, name == "true"
            case "[" | "test":
                return True, self.classic(rest[:-1] if name == "[" else rest)
            case "exit":
                raise _Exit(self._at)
            case "return":
                raise _Return(self._at, rest == ["0"] if rest and rest[0].isdigit() else None)
            case "break" | "continue":
                if rest not in ([], ["1"]):
                    raise RefusedError(f"{name} {rest[0]} is not read")
                raise _Break(self._at, kind=name)
            case "set" if "--" in rest:
                state.arguments = rest[rest.index("--") + 1 :]
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
            case "read" | "mapfile" | "readarray" | "getopts":
                return True, self._read(name, rest)
            case "source" | ".":
                file = " ".join(rest)
                if file.rsplit("/", 1)[-1].split(" ")[0] not in _SETS_UP_A_SHELL:
                    self.sourced.append((self._at, self.shown(file)))
                    state.sourced = state.sourced or f"line {self._at} reads {self.shown(file)}"
            case "exec" if not rest:
                pass
            case _:
                return False, None
        return True, True

    def _read(self, name: str, words: list[str]) -> bool | None:
        document = self._document
        if name == "read" and "-d" in words and document is not None:
            self.put(words[-1], self._lines(document).strip(" \t\n"))
            return None
        names = [word for word in words if _NAME.fullmatch(word)]
        for variable in names or ["REPLY"]:
            self.put(variable, self.mark_line(self._at, f"${variable}", f"{name} reads it"))
        return None

    def _lines(self, document: Node) -> str:
        """A here-document; with a quoted delimiter its text means itself."""
        parts = document["Hdoc"].get("Parts") or []
        if any(part["Type"] != "Lit" or "\\" in part["Value"] for part in document["Word"]["Parts"]):
            return "".join(part["Value"] for part in parts)
        return self.word({"Parts": parts}, quoted=True)

    def _other(self, words: list[str], own: dict[str, str]) -> bool | None:
        name = words[0]
        if self._printed is not None and self._condition == self._printed_under:
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
        self.commands.append(Command(self._at, words, exported | own, self._condition))
        if is_exec:
            raise _Exit(self._at)
        return None

    # What $(...) prints

    def printed(self, node: Node) -> str:
        """Return what `_pure` knows to be printed; a mark where a command would have to run."""
        kept, count, at = (self._printed, self._printed_under), len(self.commands), self._at
        self._printed, self._printed_under = [], self._condition
        try:
            self._apart(lambda: self._block(node.get("Stmts")))
        except _Stop:
            self._print(None)
        known = [line for line in self._printed if line is not None]
        is_all = len(known) == len(self._printed) and len(self.commands) == count
        (self._printed, self._printed_under), self._at = kept, at
        del self.commands[count:]
        return "\n".join(known).rstrip("\n") if is_all else self.mark(node, "commands are not run")

    def _print(self, text: str | None) -> None:
        if self._printed is not None:
            self._printed.append(text)

    def _pure(self, words: list[str]) -> str | None:
        """The output of commands that are the same on all machines."""
        match words:
            case ["echo", "-n" | "-e" | "-E" | "-ne" | "-en", *_]:
                return None
            case ["echo", *rest]:
                return " ".join(rest)
            case ["cat"] if self._document is not None:
                return self._lines(self._document).rstrip("\n")
            case ["basename", path] if is_known(path) and path.strip("/"):
                return path.rstrip("/").rsplit("/", 1)[-1]
            case ["expr", first, ("+" | "-" | "*" | "/" | "%") as op, second] if first.isdigit() and second.isdigit():
                result = calculate(op, int(first), int(second))
                return None if result is None else str(result)
        return None
