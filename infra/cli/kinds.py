"""The kinds of value the command line accepts: each refused with the form that would do."""

import re
from abc import ABC, abstractmethod
from typing import Any

import click

from actors.decisions.resources import MEMORY_FORM, parse_memory
from events import subjects
from infra.cli.text import WHEN_FORM, When, parse_length, parse_when
from infra.clock import SystemClock

_LABEL = re.compile(r"[^\s,\x00-\x1f\x7f]{1,128}")
_LABELS_MAX = 64


class _Kind(click.ParamType[Any], ABC):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value meant, or fail with the accepted form."""
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    @abstractmethod
    def read(self, text: str) -> Any:
        """Return the value, or raise ValueError with the accepted form."""


class _Name(_Kind):
    name = "name"

    def read(self, text: str) -> str:
        return subjects.checked(text, "the name")


class _AgentId(_Kind):
    name = "agent"

    def read(self, text: str) -> str:
        if not subjects.VM_ID.fullmatch(text):
            raise ValueError(
                f"{text!r} is not an agent's id; ids are 1 to 64 lowercase letters, digits and dashes "
                "(`fleetlog agent list` shows them)"
            )
        return text


class _Labels(_Kind):
    name = "label,..."

    def read(self, text: str) -> tuple[str, ...]:
        if not text.strip():
            return ()
        labels = tuple(part.strip() for part in text.split(","))
        for label in labels:
            if not _LABEL.fullmatch(label):
                raise ValueError(
                    f"{label!r} is not a label; write labels of 1 to 128 characters without spaces, with commas "
                    "between: linux,small"
                )
        if len(labels) > _LABELS_MAX:
            raise ValueError(f"{len(labels)} labels; give at most {_LABELS_MAX}")
        return labels


class _WhenKind(_Kind):
    name = "when"

    def read(self, text: str) -> When:
        return parse_when(text, SystemClock().now())


class _Length(_Kind):
    name = "time"

    def read(self, text: str) -> float:
        return parse_length(text)


class _Size(_Kind):
    name = "size"

    def read(self, text: str) -> int:
        try:
            return parse_memory(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a size; write {MEMORY_FORM}") from None


NAME = _Name()
AGENT_ID = _AgentId()
LABELS = _Labels()
WHEN = _WhenKind()
LENGTH = _Length()
SIZE = _Size()

__all__ = ["AGENT_ID", "LABELS", "LENGTH", "NAME", "SIZE", "WHEN", "WHEN_FORM"]
