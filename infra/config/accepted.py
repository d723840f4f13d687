"""What a typed place in a fleet file accepts, and what was found there, in words."""

from typing import Any

import msgspec
from msgspec import inspect

from infra.config.source import Mapping, Node, Scalar, Sequence

QUOTED_MOST = 60
"""Characters of a refused value that an error repeats."""


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """A type with what its field says about it beside: see `Walker`."""

    type: inspect.Type
    description: str = ""
    read: Any = None
    secret: bool = False
    nullable: bool = False


def marked(kind: inspect.Type) -> Marked:
    """Return the type without its wrappings: metadata, and `| None`."""
    description, read, secret, nullable = "", None, False, False
    while True:
        if isinstance(kind, inspect.Metadata):
            description = description or str((kind.extra_json_schema or {}).get("description", ""))
            extra = kind.extra or {}
            read, secret = read or extra.get("read"), secret or bool(extra.get("secret"))
            kind = kind.type
        elif isinstance(kind, inspect.UnionType):
            others = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            assert len(others) == 1, f"a field of the fleet file has one type, or one or none: {kind}"
            nullable, kind = nullable or len(others) < len(kind.types), others[0]
        else:
            break
    return Marked(type=kind, description=description, read=read, secret=secret, nullable=nullable)


def accepted(mark: Marked) -> str:
    """Return the accepted form: the field's own words, else words made from its type and limits."""
    if mark.description:
        return mark.description
    match mark.type:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least, le=most):
            return f"a whole number{_limits(least, most)}"
        case inspect.FloatType(ge=least, le=most):
            return f"a number{_limits(least, most)}"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType(values=values):
            return ("one of " if len(values) > 1 else "") + ", ".join(str(value) for value in values)
        case inspect.VarTupleType(item_type=item, min_length=least):
            return f"a list of {'one or more' if least else 'any number'}, each {_item(marked(item))}"
        case inspect.DictType(value_type=value):
            return f"a mapping of names, each to {accepted(marked(value))}"
        case inspect.StructType(fields=fields):
            return f"a mapping with the keys {', '.join(field.encode_name for field in fields)}"
        case other:
            raise AssertionError(f"the fleet file has no such type: {other}")


def found(node: Node, *, secret: bool = False) -> str:
    """Return what stands there, in words; quotes it unless it may be a secret."""
    match node:
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case Scalar(value=None):
            return "nothing"
        case Scalar(value=bool()):
            return "a truth value" if secret else f"the truth value {node.text}"
        case Scalar(value=int() | float()):
            return "a number" if secret else f"the number {node.text[:QUOTED_MOST]}"
        case Scalar():
            return "text" if secret else f'"{node.text[:QUOTED_MOST]}"'


def _item(mark: Marked) -> str:
    return "a mapping" if isinstance(mark.type, inspect.StructType) else accepted(mark)


def _limits(least: float | None, most: float | None) -> str:
    match least, most:
        case None, None:
            return ""
        case None, _:
            return f" up to {most:g}"
        case _, None:
            return f", {least:g} or more"
        case _:
            return f" from {least:g} to {most:g}"
