"""Options that were read of a file, a format's table with one row per option, and what became of an option. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic.alias_generators import to_camel

from grpo_cli.convert.fields import Convert, converter
from grpo_cli.convert.values import as_is


class Kind(StrEnum):
    """Treatment of an option."""

    SAME = "same"  # a field of the job means the same
    DIFFERENT = "differently"  # a field of the job takes its place, and the note says how
    NOT_NEEDED = "not needed"  # a job needs nothing in its place
    LEFT = "not taken over"  # training will differ: the note says why, and what to do


UNSET: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option of a format.

    `field` is a path in the job's spec. Where several options decide that, the option is a `fact`, by a name that
    `settle` reads; without it the value is the field's. When both are empty nothing is taken over.
    `default` is what the other tool does when the option is not set, given where a job's own default differs.
    `harmless` are values of an option of kind LEFT that ask for what a job does anyway; they are not reported.
    """

    name: str
    kind: Kind
    field: str = ""
    fact: str = ""
    note: str = ""
    convert: Convert = as_is
    default: Any = UNSET
    harmless: tuple[Any, ...] = ()


Rows = list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An option of the user's, and its place in the job."""

    name: str  # as the user wrote it
    value: str
    kind: Kind
    to: str = ""
    note: str = ""


@dataclass(slots=True)
class Source:
    """The options of one file, and what a job takes of a script in Python besides."""

    file: str
    format: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)  # why an option or variable has no value, by name
    remarks: list[tuple[str, str]] = field(default_factory=list)  # what else a script does, and what follows
    used: set[str] = field(default_factory=set)  # variables of --set that the script uses
    is_command: bool = False  # what a command says has precedence over what its files say
    files: dict[str, str] = field(default_factory=dict)  # by name; one is a module
    packages: tuple[str, ...] = ()  # that the module imports
    preprocess: str = ""  # module:function, empty if rows are as they are
    rows: int = 0  # of the dataset, 0 if unknown


@dataclass(frozen=True, slots=True)
class Table:
    """All options of one format, by name. Defaults are those of `release`; names of other releases are read, too."""

    format: str
    release: str
    rows: dict[str, Row]

    @classmethod
    def of(cls, name: str, release: str, *parts: Rows) -> Table:
        """Return a table of `parts`; an option has one row."""
        all_rows = rows(*parts)
        table = cls(name, release, {row.name: row for row in all_rows})
        assert len(table.rows) == len(all_rows), f"{name}: two rows for one option"
        return table


def same(options: str, to: str, *, default: Any = UNSET, convert: Convert | None = None) -> Rows:
    """Options (aliases, separated by spaces) that mean what the field `to` does; the first alone has the default."""
    return _rows(options, default, kind=Kind.SAME, field=to, convert=convert or converter(to))


def fields(section: str, options: str) -> Rows:
    """Options that mean what fields of the same names in `section` do."""
    return [row for option in options.split() for row in same(option, f"{section}.{to_camel(option)}")]


def differs(options: str, to: str, note: str, *, default: Any = UNSET, convert: Convert | None = None) -> Rows:
    """Options that become a field as `note` says; `to` is the field, "field@fact" if others decide it too, or empty."""
    path, _, fact = to.partition("@")
    convert = convert or converter(path, fact)
    return _rows(options, default, kind=Kind.DIFFERENT, convert=convert, note=note, field=path, fact=fact)


def of_vllm(options: str, convert: Convert, prefix: str = "") -> Rows:
    """Options that are arguments of vLLM with their names, which `prefix` begins."""
    arguments = [(option, option.removeprefix(prefix)) for option in options.split()]
    note = "an argument of vLLM"
    return rows(*(differs(one, f"generation.engineArgs.{name}", note, convert=convert) for one, name in arguments))


def not_needed(options: str, note: str) -> Rows:
    """Options that a job does not need."""
    return _rows(options, kind=Kind.NOT_NEEDED, note=note)


def left(options: str, note: str, *harmless: Any) -> Rows:
    """Options that have no place in a job, unless they are not set, None, or one of `harmless`."""
    return _rows(options, kind=Kind.LEFT, note=note, harmless=harmless)


def rows(*parts: Rows) -> Rows:
    """Join parts of a table."""
    return [row for part in parts for row in part]


def under(sections: str, *parts: Rows) -> Rows:
    """Join parts of a table whose options are in a section, or in each of several: that begins their names."""
    return [replace(row, name=f"{section}{row.name}") for section in sections.split() for row in rows(*parts)]


def _rows(options: str, default: Any = UNSET, **fields: Any) -> Rows:
    first, *others = options.split()
    return [Row(name=first, default=default, **fields), *(Row(name=name, **fields) for name in others)]
