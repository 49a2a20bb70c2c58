"""Follows a script as its statements say, as far as its syntax tree shows it; nothing of it runs. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.convert.python.values import BUILTINS, Code, Made, Opaque, OpaqueError, Scope, Values, opaque
from grpo_cli.convert.values import boolean, integer, number

_PARSED = ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses")
# Calls of which a job does the same, or needs none.
_TOLD = re.compile(
    r"(.*\.)?(GRPOTrainer|add_argument|close|info|print|push_to_hub|save_model|setLevel|train|warning)"
    r"|sys\.path\.insert",
    re.DOTALL,
)
_CHANGES = {"append", "extend", "update"}
_RETURNED = "return"  # no name that a script could use
_IS_MAIN = "__name__ == '__main__'"


@dataclass(frozen=True, slots=True)
class Effect:
    """A statement that changes something outside: a job does not do it."""

    node: ast.stmt
    scope: Scope
    changed: str = ""  # the name of the class or module of the script that it changes


class _ReturnError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _EndedError(Exception):
    """The script ends itself, or its command line is wrong."""


class Script:
    """Objects that a script makes, with their values, and its other effects."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        """Read `text`; `variables` are options of its command line, and values of what only a run shows.

        Raises ValueError with the line if it is not Python, or ends itself by an exception.
        """
        self.text, self.variables = text, variables
        self.used: set[str] = set()  # of `variables`
        self.is_parsed = False  # whether options of the trainer come from the command line
        self.made: list[Made] = []
        self.effects: list[Effect] = []
        self.environment: dict[str, str] = {}
        self.values = Values(self._call)
        self.scope = Scope(BUILTINS, {"__name__": "__main__"})
        self._followed: list[ast.FunctionDef] = []  # functions, each in the one before
        self._is_inside = self._is_unsure = False  # a part of a statement; and only a run shows whether it is reached
        try:
            self._run(ast.parse(text).body, self.scope)
        except SyntaxError as error:
            raise ValueError(f"line {error.lineno}: this is not Python: {error.msg}") from error
        except _EndedError as error:
            raise ValueError(str(error)) from None

    def _run(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bind(name, Code(alias, scope), node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._bind(node.name, Code(node, scope), node, scope)
            case ast.Assign():
                value = self.values.of(node.value, scope)
                for target in node.targets:
                    self._assign(target, value, node, scope)
            case ast.AnnAssign(value=ast.expr() as given):
                self._assign(node.target, self.values.of(given, scope), node, scope)
            case ast.AugAssign():
                self._assign(node.target, Opaque(node, scope), node, scope)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name, value=ast.Name() as held))) if (
                self._is_unsure and name in _CHANGES
            ):
                self._assign(held, None, node, scope)
            case ast.Expr(value=ast.Call() as call):
                value = self.values.of(call, scope)
                if isinstance(value, Opaque) and not _TOLD.fullmatch(ast.unparse(call.func)):
                    self.effects.append(Effect(node, scope))
            case ast.If():
                self._if(node, scope)
            case ast.For() | ast.While():
                self._inside([*node.body, *node.orelse], scope, is_unsure=True)
            case ast.With():
                for item in node.items:
                    if item.optional_vars:
                        self._assign(item.optional_vars, self.values.of(item.context_expr, scope), node, scope)
                self._inside(node.body, scope)
            case ast.Try():
                self._inside([*node.body, *node.orelse, *node.finalbody], scope)
            case ast.Return() if self._is_unsure:
                scope.values[_RETURNED] = Opaque(node, scope)
            case ast.Return():
                raise _ReturnError(None if node.value is None else self.values.of(node.value, scope))
            case ast.Raise() if not self._is_unsure:
                raise _EndedError(f"line {node.lineno}: the script ends here: {ast.unparse(node)}")

    def _if(self, node: ast.If, scope: Scope) -> None:
        try:
            body = node.body if self.values.known(node.test, scope) else node.orelse
        except OpaqueError:
            self._inside([*node.body, *node.orelse], scope, is_unsure=True)
        else:
            run = self._run if ast.unparse(node.test) == _IS_MAIN else self._inside
            run(body, scope)

    def _inside(self, body: Sequence[ast.stmt], scope: Scope, *, is_unsure: bool = False) -> None:
        """Follow parts of a statement. Where a run may reach them or not, what they set is not known."""
        before = self._is_inside, self._is_unsure
        self._is_inside, self._is_unsure = True, self._is_unsure or is_unsure
        try:
            self._run(body, scope)
        finally:
            self._is_inside, self._is_unsure = before

    def _bind(self, name: str, value: Any, node: ast.stmt, scope: Scope) -> None:
        is_code = isinstance(value, Code)
        if self._is_unsure and not is_code:
            value = Opaque(node, scope)
        if opaque(value) and not is_code and name in self.variables:
            self.used.add(name)
            value = self.variables[name]
        scope.values[name] = value
        scope.statements.pop(name, None)
        if is_code or not self._is_inside:
            scope.statements[name] = node

    def _assign(self, target: ast.expr, value: Any, node: ast.stmt, scope: Scope) -> None:
        match target:
            case ast.Name():
                self._bind(target.id, value, node, scope)
            case ast.Tuple() | ast.List():
                items = value if isinstance(value, tuple | list) and len(value) == len(target.elts) else None
                for number, one in enumerate(target.elts):
                    self._assign(one, items[number] if items else Opaque(node, scope), node, scope)
            case ast.Attribute(value=held, attr=name):
                owner = self.values.of(held, scope)
                if isinstance(owner, Made):
                    owner.options[name] = Opaque(node, scope) if self._is_unsure else value
                elif isinstance(owner, Code):
                    self.effects.append(Effect(node, scope, ast.unparse(held).partition(".")[0]))
            case ast.Subscript(value=held):
                owner, key = self.values.of(held, scope), self.values.of(target.slice, scope)
                if ast.unparse(held) == "os.environ" and not opaque([key, value]):
                    self.environment[str(key)] = str(value)
                elif isinstance(owner, dict) and not opaque(key):
                    owner[key] = Opaque(node, scope) if self._is_unsure else value

    def _call(self, made: Made, held: Any) -> Any:
        if isinstance(held, Code) and isinstance(held.node, ast.FunctionDef) and made.of is None:
            return self._follow(held.node, held.scope, made)
        self.made.append(made)
        return self._parsed(held, made) if isinstance(held, Made) and made.function in _PARSED else made

    def _follow(self, function: ast.FunctionDef, outer: Scope, call: Made) -> Any:
        """Return what a function of the script returns."""
        if function in self._followed or function.decorator_list:
            return Opaque(call.node, outer)
        takes = function.args
        parameters = [*takes.posonlyargs, *takes.args]
        defaults = dict(zip(reversed(parameters), reversed(takes.defaults), strict=False))
        defaults |= {one: value for one, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if value}
        inner = Scope(outer, {one.arg: Opaque(call.node, outer) for one in (*parameters, *takes.kwonlyargs)})
        inner.values |= {one.arg: self.values.of(value, outer) for one, value in defaults.items()}
        inner.values |= dict(zip((one.arg for one in parameters), call.arguments, strict=False)) | call.options
        before, self._is_inside = self._is_inside, False
        self._followed.append(function)
        value = None
        try:
            self._run(function.body, inner)
        except _ReturnError as returned:
            value = returned.value
        finally:
            self._followed.pop()
            self._is_inside = before
        return inner.values.get(_RETURNED, value)

    def _parsed(self, parser: Made, call: Made) -> Any:
        """Return what a parser of the command line returns: its options, with those of `variables`."""
        if parser.function != "ArgumentParser":  # TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
            self.is_parsed = True
            kinds = parser.arguments[0] if parser.arguments and isinstance(parser.arguments[0], tuple | list) else ()
            given = self.variables
            return tuple(Made(call.node, call.scope, getattr(kind, "text", ""), (), {**given}, call) for kind in kinds)
        found = Made(call.node, call.scope, "Namespace")
        for one in self.made:
            if one.of is parser and one.function == "add_argument":
                self._argument(one, found)
        return found if call.function == "parse_args" else (found, [])

    def is_of_command(self, value: Any) -> bool:
        """Whether a value is an option of the trainer that its command line may have."""
        if not (isinstance(value, Opaque) and isinstance(value.node, ast.Attribute)):
            return False
        held = self.values.of(value.node.value, value.scope)
        return isinstance(held, Made) and isinstance(held.of, Made) and held.of.function in _PARSED

    def _argument(self, one: Made, found: Made) -> None:
        flags = [str(name) for name in one.arguments]
        flag = next((name for name in flags if name.startswith("--")), "".join(flags[:1]))
        name = str(one.options.get("dest") or flag.lstrip("-").replace("-", "_"))
        is_switch = one.options.get("action") == "store_true"
        value = one.options.get("default", False if is_switch else None)
        if value is None and one.options.get("required"):
            value = Opaque(one.node, one.scope)
        if (given := self.variables.get(name)) is not None:
            self.used.add(name)
            kind = bool if is_switch or isinstance(value, bool) else one.options.get("type", str)
            try:
                read = {bool: boolean, int: integer, float: number}.get(kind, str)
                value = [read(word) for word in given.split()] if "nargs" in one.options else read(given)
            except ValueError as error:
                raise _EndedError(f"--set {name}: {error}") from error
        found.options[name] = value
