"""The code that a job takes of a script: functions and classes as they are, with what they need. Pure."""

from __future__ import annotations

import ast
import re
import symtable
import sys
from typing import Any

from grpo_cli.convert.python.script import Effect, Script
from grpo_cli.convert.python.values import BUILTINS, Code, Made, Opaque, Scope, opaque

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Assignment = ast.Assign | ast.AnnAssign


class Module:
    """A module in the making."""

    def __init__(self, script: Script, name: str) -> None:
        """`name`: of the module."""
        self.name = name
        self.packages: set[str] = set()  # that it imports, and Python does not have
        self.unknown: dict[str, Opaque] = {}  # its names that are None, as only a run shows their value
        self._script, self._lines = script, script.text.splitlines()
        self._imports: set[str] = set()
        self._parts: list[tuple[int, str]] = []  # by line
        self._homes: dict[str, Scope] = {}  # where the script binds what is here
        self._parsed: dict[str, Made] = {}  # command lines that it reads

    def path(self, value: Opaque, name: str) -> str:
        """Return the dotted path of a function or class, which is moved here; `name` is for one that has none."""
        node = value.node
        if isinstance(node, ast.alias):
            statement = value.scope.statements[node.asname or node.name]
            if isinstance(statement, ast.ImportFrom) and not statement.level:
                return f"{statement.module}.{node.name}"
        if isinstance(node, _Definition):
            self._need(node.name, value.scope)
            return f"{self.name}.{node.name}"
        name = node.attr if isinstance(node, ast.Attribute) else name
        self.add(f"{name} = {ast.unparse(node)}", value.scope)
        return f"{self.name}.{name}"

    def add(self, text: str, scope: Scope, line: int | None = None) -> None:
        """Add a statement, and what it needs; at the end, or where line `line` of the script is."""
        self._parts.append((line or len(self._lines) + len(self._parts), text))
        tables = [symtable.symtable(text, self.name, "exec")]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            for symbol in table.get_symbols():
                if symbol.is_global() or (table.get_type() == "module" and symbol.is_referenced()):
                    self._need(symbol.get_name(), scope)

    def changes(self) -> list[Effect]:
        """Add the statements that change what is here, and return them."""
        found: list[Effect] = []
        while new := [one for one in self._script.effects if one.changed in self._homes and one not in found]:
            found += new
            for effect in new:
                self.add(self._source(effect.node), effect.scope, effect.node.lineno)
        return found

    def text(self) -> str:
        """Return the module; empty if nothing was moved."""
        if not self._parts:
            return ""
        moved = "\n".join(text for _, text in self._parts)
        for name, made in self._parsed.items():
            read = made.options.keys() & re.findall(rf"\b{name}\.(\w+)", moved)
            options = ", ".join(f"{one}={self._literal(one, made.options[one])}" for one in sorted(read))
            self._parts.append((made.line, f"{name} = SimpleNamespace({options})"))
            self._imports.add("from types import SimpleNamespace")
        is_late = self._script.scope.values.get("annotations")  # from __future__
        head = [*["from __future__ import annotations"] * bool(is_late), *sorted(self._imports)]
        parts = [text for _, text in sorted(self._parts, key=lambda part: part[0])]
        return "\n\n\n".join([*["\n".join(head)] * bool(head), *parts]) + "\n"

    def _need(self, name: str, scope: Scope) -> None:
        home = scope.home(name)
        if home is BUILTINS or name == "__name__" or self._homes.get(name) is home:
            return
        value, statement = home.values[name], home.statements.get(name)
        if name in self._homes:
            raise ValueError(f"{name} is two things, of which a module can have one: rename one of them")
        self._homes[name] = home
        if isinstance(value, Code) and isinstance(value.node, ast.alias):
            self._import(value.node, statement)
        elif isinstance(value, Made) and value.function == "Namespace":
            self._parsed[name] = value
        elif isinstance(statement, _Definition) or (isinstance(statement, _Assignment) and _says(statement, value)):
            self.add(self._source(statement), home, statement.lineno)
        else:
            self._parts.append((statement.lineno if statement else 0, f"{name} = {self._literal(name, value)}"))

    def _import(self, alias: ast.alias, statement: ast.stmt | None) -> None:
        whole = isinstance(statement, ast.ImportFrom) and "." * statement.level + (statement.module or "")
        text = f"from {whole} import {alias.name}" if whole else f"import {alias.name}"
        self._imports.add(text + (f" as {alias.asname}" if alias.asname else ""))
        package = (whole or alias.name).partition(".")[0]
        if package not in sys.stdlib_module_names:
            self.packages.add(package or str(whole))

    def _literal(self, name: str, value: Any) -> str:
        if cause := opaque(value):
            self.unknown[name] = cause
            return "None"
        return repr(value)

    def _source(self, node: ast.stmt) -> str:
        """Return a statement as the script has it, at the left margin; texts of several lines keep theirs."""
        begin = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        assert node.end_lineno is not None
        kept = {
            line
            for one in ast.walk(node)
            if isinstance(one, ast.Constant | ast.JoinedStr) and one.end_lineno is not None
            for line in range(one.lineno + 1, one.end_lineno + 1)
        }
        margin = " " * node.col_offset
        return "\n".join(
            line if number in kept else line.removeprefix(margin)
            for number, line in enumerate(self._lines[begin - 1 : node.end_lineno], begin)
        )


def _says(statement: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    """Whether a statement still says what its name is when the training begins."""
    if opaque(value):
        return True
    try:
        return statement.value is not None and bool(ast.literal_eval(statement.value) == value)
    except ValueError:
        return False
