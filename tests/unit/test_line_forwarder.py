"""Lines of agents in our log."""

from __future__ import annotations

import json

import pytest

from infra.line_forwarder import Origin, forwarded

ORIGIN = Origin(service="fleetlog-agent", agent="vm-01")


def test_plain_text_becomes_the_message_of_an_object() -> None:
    assert json.loads(forwarded("hello", ORIGIN)) == {
        "service": "fleetlog-agent",
        "agent": "vm-01",
        "level": "info",
        "message": "hello",
    }


@pytest.mark.parametrize(
    "line", ["[1, 2]", "42", '"text"', "null", "{broken", '{"a": 1} trailing', "{" * 60_000, '{"a":' * 20_000]
)
def test_what_is_no_json_object_is_wrapped_as_it_is(line: str) -> None:
    assert json.loads(forwarded(line, ORIGIN))["message"] == line


def test_a_json_object_keeps_its_own_fields() -> None:
    line = '{"level": "error", "message": "boom", "service": "runner", "n": 3}'
    assert json.loads(forwarded(line, ORIGIN)) == {
        "level": "error",
        "message": "boom",
        "service": "runner",
        "n": 3,
        "agent": "vm-01",
    }


def test_an_agent_cannot_speak_as_another() -> None:
    assert json.loads(forwarded('{"agent": "vm-02"}', ORIGIN))["agent"] == "vm-01"


def test_what_is_not_known_is_left_out_and_what_is_known_is_added() -> None:
    known = Origin(service="s", agent="a", run="r", request="q", job="j", source="bare-metal")
    assert json.loads(forwarded("x", known)) == {
        "service": "s",
        "agent": "a",
        "run": "r",
        "request": "q",
        "job": "j",
        "source": "bare-metal",
        "level": "info",
        "message": "x",
    }


@pytest.mark.parametrize("line", ["a\rb\u2028c", '{"message": "two\\nlines"}', "\0\x1b[31m"])
def test_one_line_stays_one_line(line: str) -> None:
    assert "\n" not in forwarded(line, ORIGIN)
