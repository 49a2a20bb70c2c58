"""What all sections of a GRPOJob's spec have in common: names on the wire, and rules that the API server and pydantic both hold.

Torch-free: the operator imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Text = Annotated[str, Field(min_length=1, max_length=1024)]
FunctionPath = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Size = Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$")]
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class Rule(NamedTuple):
    """One statement about a section, for the API server (CEL) and for pydantic, refused by both in the same words.

    `works` and `works_cel` give a value that would do, put behind the message.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool]
    works: Callable[[Any], object] | None = None
    works_cel: str = ""

    def complaint(self, section: Any) -> str:
        """What is said when the rule does not hold."""
        return self.message if self.works is None else f"{self.message}; {self.works(section)} would work"

    def validation(self) -> dict[str, str]:
        """The rule as an entry of x-kubernetes-validations."""
        entry = {"rule": self.cel, "message": self.message}
        if self.works_cel:
            quoted = self.message.replace("'", "\\'").replace("%", "%%")
            # format(), since the API server takes string() + string for unbounded and refuses the CRD for its cost.
            entry["messageExpression"] = f"'{quoted}; %d would work'.format([{self.works_cel}])"
        return entry


class Section(BaseModel):
    """A part of the spec: camelCase on the wire, unknown fields refused, `RULES` checked here and by the API server."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)
    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        broken = [rule.complaint(self) for rule in self.RULES if not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json = handler(schema)
        if cls.RULES:
            handler.resolve_ref_schema(json)["x-kubernetes-validations"] = [rule.validation() for rule in cls.RULES]
        return json


def one_of(*names: str) -> Rule:
    """The rule that exactly one of the optional fields `names` is set."""
    wire = [to_camel(name) for name in names]
    return Rule(
        f"[{', '.join(f'has(self.{name})' for name in wire)}].filter(x, x).size() == 1",
        f"exactly one of {', '.join(wire)} must be set",
        lambda section: sum(getattr(section, name) is not None for name in names) == 1,
    )


def in_bytes(size: str) -> int:
    """A `Size` as a number of bytes."""
    digits = size.rstrip("KMGTi")
    return int(digits) * {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[size[len(digits) :]]


def dump(section: BaseModel) -> dict[str, Any]:
    """JSON form of a section: camelCase, unset optionals left out."""
    return section.model_dump(mode="json", by_alias=True, exclude_none=True)
