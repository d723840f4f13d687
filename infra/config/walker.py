"""Reads a YAML tree into msgspec structs by their types, and collects every problem instead of the first."""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from infra.config import source
from infra.config.accepted import Marked, accepted, found, marked
from infra.config.problems import Path, Problem, dotted

T = TypeVar("T", bound=msgspec.Struct)

RENAMED = {"type": "backend", "orchestrator_url": "nats_url", "cpu": "cpus", "max_cpus": "max_cpu"}
"""Words people try that no rule of spelling would lead to the right key."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How a type is written in files when that differs from the type itself; `convert` may raise ValueError."""

    written: type[msgspec.Struct]
    convert: Callable[[Any], msgspec.Struct]


class _Bad:
    """Stands for a value that cannot be used; its problem is already noted."""


_BAD = _Bad()


class Walker:
    """One reading into `problems`.

    A struct with problems is built all the same, with stand-ins, so that the checks over whole structs find
    their problems too; whoever walks throws everything away when there are problems.

    Two marks in a field's `msgspec.Meta(extra=...)` are obeyed: `read`, a function over the value that is
    otherwise right (a ValueError refuses it), and `secret`: the value is never quoted.
    """

    def __init__(self, forms: Mapping[type, Form], problems: list[Problem]) -> None:
        self._forms = forms
        self._problems = problems
        self._wrong: set[tuple[str, str]] = set()  # every place with a problem at it or below it
        for problem in problems:
            self._mark(problem.file, problem.path)
        self.subject = ""  # the scaler that problems are said to be in

    def read(self, cls: type[T], node: source.Node, path: Path) -> T:
        """Return the struct that `node` holds."""
        kind = inspect.type_info(cls)
        value = self._value(kind, node, path)
        return value if isinstance(value, cls) else _stand_in(kind)

    def note(self, node: source.Node, path: Path, what: str, accepted: str) -> None:
        """Note a problem at `path`, unless it or something below it is already known to be wrong."""
        place = dotted(path)
        if self.knows(node, path):
            return
        self._mark(node.file, place)
        self._problems.append(
            Problem(
                file=node.file,
                line=node.line,
                path=place,
                what=what,
                accepted=accepted,
                subject=self.subject,
            )
        )

    def knows(self, node: source.Node, path: Path) -> bool:
        """Tell whether a problem is noted at `path` or below it."""
        return (node.file, dotted(path)) in self._wrong

    def _mark(self, file: str, place: str) -> None:
        above = {place[:end] for end, char in enumerate(place) if char in ".["}
        self._wrong.update((file, each) for each in (*above, place))

    def _value(self, kind: inspect.Type, node: source.Node, path: Path) -> Any:
        mark = marked(kind)
        if mark.nullable and isinstance(node, source.Scalar) and node.value is None:
            return None
        match mark.type:
            case inspect.StructType(cls=cls):
                value = self._struct(mark, cls, node, path)
            case inspect.VarTupleType():
                value = self._tuple(mark, mark.type, node, path)
            case inspect.DictType():
                value = self._dict(mark, mark.type, node, path)
            case _:
                value = self._scalar(mark, node, path)
        if value is _BAD or mark.read is None:
            return value
        try:
            return mark.read(value)
        except ValueError as error:
            self.note(node, path, str(error), accepted(mark))
            return _BAD

    def _refuse(self, mark: Marked, node: source.Node, path: Path) -> _Bad:
        form = accepted(mark)
        if (
            isinstance(mark.type, inspect.StrType)
            and isinstance(node, source.Scalar)
            and not isinstance(node.value, str | None)
            and _fits(mark.type, node.text)
        ):
            form += " (in quotes)" if mark.secret else f', in quotes: "{node.text}"'
        self.note(node, path, f"found {found(node, secret=mark.secret)}", form)
        return _BAD

    def _struct(self, mark: Marked, cls: type[msgspec.Struct], node: source.Node, path: Path) -> Any:
        if (form := self._forms.get(cls)) is not None:
            written = self._struct(marked(inspect.type_info(form.written)), form.written, node, path)
            if written is _BAD:
                return _BAD
            try:
                return form.convert(written)
            except ValueError as error:
                self.note(node, path, str(error), accepted(marked(inspect.type_info(form.written))))
                return _BAD
        if not isinstance(node, source.Mapping):
            return self._refuse(mark, node, path)
        assert isinstance(mark.type, inspect.StructType)
        fields = {field.encode_name: field for field in mark.type.fields}
        for key, below in node.entries.items():
            if key not in fields:
                self.note(below, (*path, key), "unknown key", _instead(key, list(fields)))
        values = {}
        for name, field in fields.items():
            if (below_node := node.entries.get(name)) is not None:
                value = self._value(field.type, below_node, (*path, name))
            else:
                value = _BAD
                if field.required:
                    self.note(node, (*path, name), "missing", accepted(marked(field.type)))
            if value is not _BAD:
                values[field.name] = value
            elif field.required:
                values[field.name] = _stand_in(field.type)
        return cls(**values)

    def _tuple(self, mark: Marked, kind: inspect.VarTupleType, node: source.Node, path: Path) -> Any:
        if not isinstance(node, source.Sequence) or len(node.items) < (kind.min_length or 0):
            if isinstance(node, source.Sequence):
                self.note(node, path, "found an empty list", accepted(mark))
                return _BAD
            return self._refuse(mark, node, path)
        if len(node.items) > (kind.max_length or math.inf):
            self.note(node, path, f"found a list of {len(node.items)}", f"at most {kind.max_length} of them")
            return _BAD
        found = [self._value(kind.item_type, item, (*path, index)) for index, item in enumerate(node.items)]
        return tuple(value for value in found if value is not _BAD)

    def _dict(self, mark: Marked, kind: inspect.DictType, node: source.Node, path: Path) -> Any:
        if not isinstance(node, source.Mapping):
            return self._refuse(mark, node, path)
        values = {}
        for key, below in node.entries.items():
            written = source.Scalar(file=below.file, line=below.line, value=key, text=key)
            name = self._value(kind.key_type, written, (*path, key))
            value = self._value(kind.value_type, below, (*path, key))
            if name is not _BAD and value is not _BAD:
                values[name] = value
        return values

    def _scalar(self, mark: Marked, node: source.Node, path: Path) -> Any:
        if not isinstance(node, source.Scalar) or not _fits(mark.type, node.value):
            return self._refuse(mark, node, path)
        if isinstance(mark.type, inspect.FloatType):
            assert isinstance(node.value, int | float)
            return float(node.value)
        return node.value


def _fits(kind: inspect.Type, value: object) -> bool:
    match kind, value:
        case inspect.BoolType(), bool():
            return True
        # A truth value is a number to Python and never one to people, so True != 1 here.
        case inspect.LiteralType(values=values), _:
            return any(value == each and type(value) is type(each) for each in values)
        case _, bool():
            return False
        case inspect.IntType(), int():
            return _within(kind, value)
        case inspect.FloatType(), int() | float():
            return math.isfinite(value) and _within(kind, value)
        case inspect.StrType(pattern=pattern, min_length=least, max_length=most), str():
            if len(value) < (least or 0) or len(value) > (most or math.inf):
                return False
            return pattern is None or re.fullmatch(pattern, value) is not None
        case _:
            return False


def _within(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def _instead(key: str, known: list[str]) -> str:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
    if snake.endswith("_seconds"):
        snake = snake.removesuffix("econds")
    snake = RENAMED.get(snake, snake)
    close = [snake] if snake in known else difflib.get_close_matches(snake, known, n=1)
    return (f"perhaps {close[0]}; " if close else "") + f"the keys {', '.join(known)}"


def _stand_in(kind: inspect.Type) -> Any:
    """Return some value of the type, to let the checks over whole structs run; it never leaves a load."""
    mark = marked(kind)
    if mark.nullable:
        return None
    match mark.type:
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.IntType(ge=least):
            return least or 1
        case inspect.FloatType(ge=least):
            return float(least or 1.0)
        case inspect.BoolType():
            return False
        case inspect.VarTupleType():
            return ()
        case inspect.DictType():
            return {}
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _stand_in(field.type) for field in fields if field.required})
        case _:
            return ""
