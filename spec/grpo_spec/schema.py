"""The base of all sections of a GRPOJob's spec: camelCase in JSON, and rules that pydantic and the API server check.

Torch-free: the operator imports it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

Text = Annotated[str, Field(min_length=1, max_length=1024)]
FUNCTION_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
FunctionPath = Annotated[str, Field(max_length=256, pattern=FUNCTION_PATH)]
Size = Annotated[str, Field(max_length=32, pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti)?$")]
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""Name of an object that exists in the cluster: most kinds allow dots."""

_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=rf"^({_LABEL}(\.{_LABEL})*/)?{_QUALIFIED}")]
ResourceName = Annotated[str, Field(min_length=1, max_length=317, pattern=rf"^{_LABEL}(\.{_LABEL})*/{_QUALIFIED}")]
"""Name of an extended resource, which has a domain: nvidia.com/gpu."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"is no regular expression of Python: {error}") from error
    return pattern


def _has_one_group(pattern: str) -> str:
    if (groups := re.compile(pattern, re.DOTALL).groups) != 1:
        raise ValueError(f"has {groups} groups; 1 would work: (?:...) makes no group")
    return pattern


Pattern = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_compiles)]
"""A regular expression of Python, in which a dot also matches line ends."""

OneGroup = Annotated[Pattern, AfterValidator(_has_one_group)]
"""A regular expression whose only group is what is looked for."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


INTEGERS = BeforeValidator(_no_bool)
"""Marks a Literal of integers: for Python true is 1, for the API it is not."""


WITHOUT_RULES = {"rules": False}
"""Validation context in which sections do not check their rules: for what was accepted, maybe by an older release."""


class Rule(NamedTuple):
    """One rule about a section. The API server (CEL) and pydantic refuse what breaks it with the same message.

    `works` and `works_cel` compute a value that would be accepted; it is appended to the message.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool]
    works: Callable[[Any], object] | None = None
    works_cel: str = ""

    def complaint(self, section: Any) -> str:
        """Error message for a section that breaks the rule."""
        return self.message if self.works is None else f"{self.message}; {self.works(section)} would work"

    def validation(self) -> dict[str, str]:
        """The rule as an entry of x-kubernetes-validations."""
        entry = {"rule": self.cel, "message": self.message}
        if self.works_cel:
            quoted = self.message.replace("'", "\\'").replace("%", "%%")
            # format(), because the API server counts string() + string as unbounded and refuses the CRD for its cost.
            entry["messageExpression"] = f"'{quoted}; %d would work'.format([{self.works_cel}])"
        return entry


class Section(BaseModel):
    """A part of the spec: camelCase in JSON, unknown fields refused, `RULES` checked here and by the API server."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self, info: ValidationInfo) -> Self:
        if info.context is WITHOUT_RULES:
            return self
        broken = [rule.complaint(self) for rule in self.RULES if not rule.holds(self)]
        if broken := [*broken, *self._duplicates()]:
            raise ValueError("; ".join(broken))
        return self

    def _duplicates(self) -> Iterator[str]:
        """Yield what is twice in a list with a key or in a set, as the API server finds it by these extensions."""
        for name, field in type(self).model_fields.items():
            extra: Any = field.json_schema_extra or {}
            for key in extra.get("x-kubernetes-list-map-keys", ()):
                counts = Counter(getattr(one, key) for one in getattr(self, name) or ())
                yield from (f"{to_camel(name)} has {key} {one!r} twice" for one, count in counts.items() if count > 1)
            if extra.get("x-kubernetes-list-type") == "set":
                once = Counter(getattr(self, name))
                yield from (f"{to_camel(name)} has {one!r} twice" for one, count in once.items() if count > 1)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json = handler(schema)
        if cls.RULES:
            handler.resolve_ref_schema(json)["x-kubernetes-validations"] = [rule.validation() for rule in cls.RULES]
        return json


_RESERVED = (
    *("as", "break", "const", "continue", "else", "for", "function", "if", "import"),
    *("let", "loop", "package", "namespace", "return", "var", "void", "while"),
)
"""Words of CEL. A field of this name is written __name__ in rules; before 1.32, Kubernetes accepts nothing else."""


def in_cel(name: str) -> str:
    """Return a field's name as a rule writes it."""
    return f"__{name}__" if name in _RESERVED else name


def one_of(*names: str) -> Rule:
    """Return the rule that exactly one of the optional fields `names` is set."""
    in_json = [to_camel(name) for name in names]
    return Rule(
        f"[{', '.join(f'has(self.{in_cel(name)})' for name in in_json)}].filter(x, x).size() == 1",
        f"exactly one of {', '.join(in_json)} must be set",
        lambda section: sum(getattr(section, name) is not None for name in names) == 1,
    )


def in_bytes(size: str) -> int:
    """Return a `Size` as a number of bytes."""
    digits = size.rstrip("KMGTi")
    return int(digits) * {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[size[len(digits) :]]


def dump(section: BaseModel) -> dict[str, Any]:
    """Return a section as JSON: names in camelCase, optional fields that are not set left out."""
    return section.model_dump(mode="json", by_alias=True, exclude_none=True)
