"""Puts a changed source into a module that others have imported already: functions get the new code in place."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any


def graft(module: ModuleType, source: str, line: int) -> None:
    """Give the functions of `module` the code that `source` has for them, and constants if `line` is of one."""
    fresh = ModuleType(module.__name__)
    fresh.__file__ = module.__file__
    known = sys.modules[module.__name__]
    sys.modules[module.__name__] = fresh  # dataclasses look for their module there
    try:
        exec(compile(source, module.__file__ or "", "exec", dont_inherit=True), fresh.__dict__)
    finally:
        sys.modules[module.__name__] = known
    changed = dict(_functions(fresh.__dict__, module.__name__))
    for name, function in _functions(module.__dict__, module.__name__):
        function.__code__ = changed[name].__code__
        function.__defaults__ = changed[name].__defaults__
        function.__kwdefaults__ = changed[name].__kwdefaults__
    for name in _constants(source, line):
        old, new = getattr(module, name), getattr(fresh, name)
        for other in list(sys.modules.values()):
            for known_as, value in list(getattr(other, "__dict__", {}).items()):
                if value is old and known_as == name:
                    setattr(other, known_as, new)


def _functions(namespace: dict[str, Any], module: str) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of a module or a class, also below decorators, by their qualified names."""
    for key, value in list(namespace.items()):
        if isinstance(value, type):
            if value.__module__ == module and key != "__base__":
                yield from _functions(dict(vars(value)), module)
            continue
        parts: list[Any] = [value.fget, value.fset] if isinstance(value, property) else [value]
        for part in parts:
            function: Any = getattr(part, "__func__", part)
            while hasattr(function, "__wrapped__"):
                if hasattr(function, "cache_clear"):
                    function.cache_clear()
                function = function.__wrapped__
            # What dataclasses generate has no file.
            if isinstance(function, FunctionType) and function.__module__ == module and _is_written(function):
                yield f"{function.__qualname__} {key} {function.__code__.co_name}", function


def _is_written(function: FunctionType) -> bool:
    return not function.__code__.co_filename.startswith("<")


def _constants(source: str, line: int) -> list[str]:
    """Return the names that a statement of the module itself assigns in `line`."""
    for node in ast.parse(source).body:
        if node.lineno <= line <= (node.end_lineno or 0) and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []
