"""The state of an environment after its episode, on its way from its process to rewards that read `environments`.

The rank passes it on as bytes and never unpickles them: that could run any code.
"""

from __future__ import annotations

import importlib
import pickle
from types import SimpleNamespace
from typing import Any

from grpo_workload.environments.requests import MAX_STATE


def snapshot(instance: object, limit: int = MAX_STATE) -> tuple[bytes, dict[str, str]]:
    """Return the attributes of an environment that pickle, at most `limit` bytes, and why others are left out."""
    pickled: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for name, value in _attributes(instance).items():
        try:
            pickled[name] = pickle.dumps(value)
        except Exception as error:  # whatever the objects raise
            left_out[name] = f"{type(error).__name__}: {error}"[:200]
    kind = type(instance)
    while True:
        state = pickle.dumps((kind.__module__, kind.__qualname__, pickled))
        if len(state) <= limit or not pickled:
            return state, left_out
        largest = max(pickled, key=lambda name: len(pickled[name]))
        left_out[largest] = f"it has {len(pickled.pop(largest))} bytes, and the state may have {limit}"


def rebuild(state: bytes) -> object:
    """Make the environment again, for users' rewards: only in a process that runs users' code.

    Its class is not initialized. It is a SimpleNamespace if the class cannot be imported here, and lacks attributes
    whose classes cannot be.
    """
    module, qualname, pickled = pickle.loads(state)
    made: Any = SimpleNamespace()
    try:
        kind: Any = importlib.import_module(module)
        for part in qualname.split("."):
            kind = getattr(kind, part)
        made = object.__new__(kind)
    except Exception:  # a user's module may raise anything
        made = SimpleNamespace()
    for name, value in pickled.items():
        try:
            object.__setattr__(made, name, pickle.loads(value))
        except Exception:  # as the attributes that `snapshot` leaves out
            continue
    return made


def _attributes(instance: object) -> dict[str, Any]:
    slots = [
        name
        for kind in type(instance).__mro__
        for name in _names(getattr(kind, "__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(instance, name)
    ]
    return {name: getattr(instance, name) for name in slots} | dict(getattr(instance, "__dict__", {}))


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
