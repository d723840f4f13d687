"""One thing that was looked at: how it is, and what to do about it."""

from typing import Literal

import msgspec

Status = Literal["pass", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`todo` is empty when nothing needs doing."""

    name: str
    status: Status
    detail: str
    todo: str = ""


def good(name: str, detail: str) -> Check:
    """Return that all is well."""
    return Check(name=name, status="pass", detail=detail)


def warn(name: str, detail: str, todo: str) -> Check:
    """Return that it works, and that somebody should look."""
    return Check(name=name, status="warn", detail=detail, todo=todo)


def fail(name: str, detail: str, todo: str) -> Check:
    """Return that it does not work, or a promise is broken."""
    return Check(name=name, status="fail", detail=detail, todo=todo)
