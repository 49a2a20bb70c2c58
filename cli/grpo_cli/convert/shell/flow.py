"""The course of a script: its statements, conditions and loops, followed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

from grpo_cli.convert.shell.conditions import Conditions
from grpo_cli.convert.shell.state import Break, Run, is_known, matches, negated
from grpo_cli.convert.shell.tree import Node, RefusedError

_MAX_STEPS = 20_000


class Flow(Conditions):
    """Statements, evaluated; a status is True, False, or None where it is not known."""

    def __init__(self, source: bytes, given: dict[str, str]) -> None:
        super().__init__(source, given)
        self._functions: dict[str, Node] = {}
        self._printed: list[str | None] | None = None  # within $(...); None: not known
        self._document: Node | None = None  # a here-document
        self._steps = 0
        self._at = 1
        self._kinds: dict[str, Callable[[Node], bool | None]] = {
            "Block": lambda cmd: self._block(cmd["Stmts"]),
            "Subshell": lambda cmd: self._apart(lambda: self._block(cmd["Stmts"])),
            "TimeClause": lambda cmd: self._stmt(cmd["Stmt"]) if "Stmt" in cmd else True,
            "TestClause": lambda cmd: self.test(cmd["X"]),
            "ArithmCmd": self._numbers,
            "LetClause": self._numbers,
            "FuncDecl": self._define,
            "BinaryCmd": self._pair,
            "IfClause": self._if,
            "CaseClause": self._case,
            "WhileClause": self._while,
            "ForClause": self._for,
        }

    def _print(self, text: str | None) -> None:
        if self._printed is not None:
            self._printed.append(text)

    def _step(self, line: int) -> None:
        self._at = line
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise RefusedError("this loop does not end")

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
        return negated(status, bool(stmt.get("Negated")))

    def _run(self, cmd: Node) -> bool | None:
        if cmd["Type"] not in self._kinds:
            raise RefusedError(f"{cmd['Type']} is not read")
        return self._kinds[cmd["Type"]](cmd)

    def _numbers(self, cmd: Node) -> bool | None:
        """Evaluate expressions; return whether the last is true."""
        values = [self.arithmetic(node) for node in (cmd.get("Exprs") or [cmd["X"]])]
        return None if values[-1] is None else values[-1] != 0

    def _define(self, cmd: Node) -> bool:
        self._functions[cmd["Name"]["Value"]] = cmd["Body"]
        return True

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
        branches = (lambda: self._block(cmd.get("Then")), lambda: self._if(cmd["Else"]) if "Else" in cmd else True)
        status = self._block(cmd["Cond"])
        return self._fork(self.line(cmd), branches) if status is None else branches[not status]()

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

    # Loops

    def _while(self, cmd: Node) -> bool | None:
        return self._loop(cmd, lambda: negated(self._block(cmd["Cond"]), bool(cmd.get("Until"))))

    def _loop(self, cmd: Node, condition: Run, after: Callable[[], object] = lambda: None) -> bool | None:
        since, before = len(self._early), None
        while True:
            self._step(self.line(cmd))
            status = condition()
            if status is None:
                self._some_times(cmd)
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
        self._join(Break, since)
        return None

    def _body(self, cmd: Node) -> bool:
        """Run the body of a loop once; return whether a `break` ended the loop."""
        try:
            self._block(cmd["Do"])
        except Break as stop:
            return stop.kind == "break"
        return False

    def _some_times(self, cmd: Node, before: Callable[[], object] = lambda: None) -> None:
        """Run the body of a loop that only a run counts; the second turn sees what the first one changed."""

        def turn() -> None:
            before()
            if self._body(cmd):
                raise Break(self._at, kind="break")

        for _ in range(2):
            self._fork(self.line(cmd), [turn, lambda: None])

    def _for(self, cmd: Node) -> bool | None:
        if cmd.get("Select"):
            raise RefusedError("select is not read")
        loop, since = cmd["Loop"], len(self._early)
        if loop["Type"] == "CStyleLoop":
            if "Init" in loop:
                self.arithmetic(loop["Init"])
            condition = {"X": loop["Cond"]} if "Cond" in loop else None
            after = (lambda: self.arithmetic(loop["Post"])) if "Post" in loop else lambda: None
            return self._loop(cmd, lambda: self._numbers(condition) if condition else True, after)
        written = loop.get("Items") or []
        is_in = "InPos" in loop
        values = [word for item in written for word in self.fields(item)] if is_in else list(self.state.arguments)
        name = loop["Name"]["Value"]
        for value in values:
            self._step(self.line(cmd))
            if not is_known(value):  # it may stand for several words, or none
                self._some_times(cmd, partial(self.put, name, value))
                continue
            self.put(name, value)
            if self._body(cmd):
                break
        self._join(Break, since)
        return None
