"""Import of functions that users name as module:function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from grpo_spec.errors import ConfigError


def import_function(field: str, path: str) -> Callable[..., Any]:
    """Import the function at `path`. ConfigError, naming `field`, if it or its module cannot be imported."""
    where = f"{field}: {path}"
    module_name, attribute = path.split(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        hint = (
            "put it on PYTHONPATH, in the image or on a mounted volume"
            if isinstance(error, ModuleNotFoundError)
            else "fix it"
        )
        raise ConfigError(
            f"{where}: importing {module_name} failed with {type(error).__name__}: {error}; {hint}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{where}: module {module_name} has no {attribute}; it has {', '.join(public) or 'no functions'}"
        )
    if not callable(function):
        raise ConfigError(f"{where}: {attribute} is a {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)
