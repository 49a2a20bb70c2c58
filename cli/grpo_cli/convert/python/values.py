"""Values of a script's expressions, as far as its syntax tree shows them. Nothing of the script runs. Pure."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MOST = 200_000  # items or letters of one value


@dataclass(slots=True)
class Scope:
    """The names of a module or function."""

    outer: Scope | None = None
    values: dict[str, Any] = field(default_factory=dict)
    statements: dict[str, ast.stmt] = field(default_factory=dict)  # that bind them, where every run reaches them

    def home(self, name: str) -> Scope:
        """Return the scope that binds `name`: this one, or one around it; the outermost if none does."""
        return self if name in self.values or self.outer is None else self.outer.home(name)


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An expression without a value to read: code (a function, a class, a module), or a result of a run."""

    node: ast.AST
    scope: Scope

    @property
    def line(self) -> int:
        """Its line in the script."""
        return int(getattr(self.node, "lineno", 0))

    @property
    def text(self) -> str:
        """Its text in the script, on one line."""
        return " ".join(ast.unparse(self.node).split())


class Code(Opaque):
    """A function, a class, a lambda or an import."""


@dataclass(frozen=True, slots=True, eq=False)
class Made(Opaque):
    """Result of a call, known by the call."""

    function: str  # its last name: GRPOConfig, load_dataset
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # and attributes that the script sets later
    of: Any = None  # the object whose method it is


class OpaqueError(Exception):
    """An expression needs the value of something opaque, its argument."""


def opaque(value: Any) -> Opaque | None:
    """Return what in `value` has no value to read; None if all of it has one."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return next(filter(None, map(opaque, value)), None)
    return value if isinstance(value, Opaque) else None


# fmt: off
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.BitOr: operator.or_, ast.USub: operator.neg, ast.Not: operator.not_, ast.Is: operator.is_,
    ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
BUILTINS = Scope(values={one.__name__: one for one in (len, str, int, float, bool, list, tuple, dict, range, min, max)})
_METHODS: dict[type, str] = {
    str: "split strip lower upper replace removeprefix removesuffix startswith endswith join",
    list: "append extend",
    dict: "get items update",
}
# fmt: on
_HOLDS_ANY = ("append", "extend", "update", "dict", "list", "tuple")
_WRONG = (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError, OverflowError)


class Values:
    """Expressions -> values."""

    def __init__(self, call: Callable[[Made, Any], Any]) -> None:
        """`call` follows what is not Python's own: a call, and the function or a method's object."""
        self._call = call

    def of(self, node: ast.expr, scope: Scope) -> Any:
        """Return the value; Opaque where the tree does not show it."""
        try:
            return self._of(node, scope)
        except OpaqueError as error:
            return error.args[0]
        except _WRONG:
            return Opaque(node, scope)

    def known(self, node: ast.expr | None, scope: Scope) -> Any:
        """Return the value, all of which is known. OpaqueError otherwise."""
        value = None if node is None else self.of(node, scope)
        if cause := opaque(value):
            raise OpaqueError(cause)
        return value

    def _of(self, node: ast.expr, scope: Scope) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return scope.home(node.id).values[node.id]
            case ast.List():
                return [self.of(item, scope) for item in node.elts]
            case ast.Tuple():
                return tuple(self.of(item, scope) for item in node.elts)
            case ast.Dict():
                found: dict[Any, Any] = {}
                for key, item in zip(node.keys, node.values, strict=True):
                    value = self.of(item, scope)
                    found |= value if key is None else {self.known(key, scope): value}
                return found
            case ast.JoinedStr():
                return "".join(str(self.known(part, scope)) for part in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return self.known(node.value, scope)
            case ast.IfExp():
                return self._of(node.body if self.known(node.test, scope) else node.orelse, scope)
            case ast.BoolOp():
                for part in node.values:
                    value = self.known(part, scope)
                    if bool(value) is isinstance(node.op, ast.Or):
                        break
                return value
            case ast.UnaryOp():
                return _OPERATORS[type(node.op)](self.known(node.operand, scope))
            case ast.BinOp():
                left, right = self.known(node.left, scope), self.known(node.right, scope)
                if not isinstance(node.op, ast.Mult):
                    return _OPERATORS[type(node.op)](left, right)
                sizes = [len(one) if hasattr(one, "__len__") else one for one in (left, right)]
                if abs(sizes[0] * sizes[1]) <= _MOST:
                    return left * right
            case ast.Compare(ops=[one], comparators=[other]):
                return _OPERATORS[type(one)](self.known(node.left, scope), self.known(other, scope))
            case ast.Subscript(slice=ast.Slice(step=None) as part):
                return self.known(node.value, scope)[self.known(part.lower, scope) : self.known(part.upper, scope)]
            case ast.Subscript():
                held, key = self.of(node.value, scope), self.known(node.slice, scope)
                return Made(node, scope, "[]", (key,), of=held) if isinstance(held, Made) else held[key]
            case ast.Attribute():
                held = self.of(node.value, scope)
                return held.options[node.attr] if isinstance(held, Made) else Opaque(node, scope)
            case ast.ListComp(generators=[ast.comprehension(ifs=tests, target=ast.Name(id=name), iter=items)]):
                if len(each := self.known(items, scope)) <= _MOST:
                    inner = [Scope(scope, {name: item}) for item in each]
                    return [self.of(node.elt, one) for one in inner if all(self.known(test, one) for test in tests)]
            case ast.Call():
                return self._called(node, scope)
            case ast.Lambda():
                return Code(node, scope)
        return Opaque(node, scope)

    def _called(self, node: ast.Call, scope: Scope) -> Any:
        arguments = tuple(self.of(one, scope) for one in node.args)
        options: dict[str, Any] = {}
        for one in node.keywords:
            value = self.of(one.value, scope)
            options |= value if one.arg is None else {one.arg: value}
        if isinstance(node.func, ast.Attribute):
            held = self.of(node.func.value, scope)
            own = node.func.attr in _METHODS.get(type(held), "").split()
            function = getattr(held, node.func.attr) if own else None
        else:
            held = function = self.of(node.func, scope)
        if not callable(function):
            name = ast.unparse(node.func).rpartition(".")[2]
            of = held if isinstance(node.func, ast.Attribute) else None
            return self._call(Made(node, scope, name, arguments, options, of), held)
        if function.__name__ not in _HOLDS_ANY and (cause := opaque([*arguments, options])):
            raise OpaqueError(cause)
        return function(*arguments, **options)
