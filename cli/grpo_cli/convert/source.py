"""Content of one file, as it was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Moved:
    """Parts of a script that a job takes besides options."""

    files: dict[str, str]  # by name; one is a module
    packages: tuple[str, ...]  # that the module imports
    preprocess: str  # module:function, empty if rows are as they are
    rows: int  # of the dataset, 0 if unknown


@dataclass(frozen=True, slots=True)
class Source:
    """The options of one file."""

    file: str
    format: str
    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)  # why an option or variable has no value, by name
    remarks: tuple[tuple[str, str], ...] = ()  # what else a script does, and what follows
    used: frozenset[str] = frozenset()  # variables of --set that the script uses
    is_command: bool = False  # what a command says has precedence over what its files say
    moved: Moved | None = None
