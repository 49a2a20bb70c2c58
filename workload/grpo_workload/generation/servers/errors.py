"""Failures of engines, as their ranks see them."""

from __future__ import annotations

from grpo_spec.contract import Engine
from grpo_spec.errors import ConfigError
from grpo_workload.weights.differ import WeightsDifferError


class EngineError(RuntimeError):
    """The failure of `engine`; the text names the engine, its pod and its address."""

    def __init__(self, engine: Engine, what: str) -> None:
        super().__init__(engine, what)  # both as arguments: it is pickled and sent to other ranks
        self.engine = engine
        self.what = what

    def __str__(self) -> str:
        return f"engine {self.engine.name} (pod {self.engine.pod}, {self.engine.host}:{self.engine.port}) {self.what}"


class NoAnswerError(EngineError):
    """The connection failed; whether the request was handled is unknown."""


class SilentError(EngineError):
    """The engine did not answer in time: it would not the next time either."""


class AbsentError(NoAnswerError):
    """The engine's host has no address: its pod does not exist, or has no node."""


class BusyError(EngineError):
    """The engine answered 503: it is paused or starting."""


class EngineDiffersError(EngineError, WeightsDifferError):
    """The engine's workers found that its weights differ from the trainer's."""


class RefusedError(EngineError, ConfigError):
    """The engine answered 400: it refuses the content of the request."""


class StuckError(EngineError):
    """The engine answers, but gets no further with its requests."""
