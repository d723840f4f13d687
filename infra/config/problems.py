"""What is wrong with a fleet file: every problem with its place, what was found and what would be accepted."""

from collections.abc import Sequence

import msgspec

SHOWN_MOST = 100
"""Problems listed in one error; a broken file must not flood a terminal or a log line."""

KEY_SHOWN_MOST = 80

Path = tuple[str | int, ...]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something about a value that reads well on its own; `path` counts from the struct that found it."""

    path: Path
    what: str
    accepted: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. `line` 0: the file as a whole. `subject` names the scaler it is in, if any."""

    file: str
    line: int
    path: str
    what: str
    accepted: str
    subject: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        path = f" {self.path}" if self.path else ""
        subject = f" ({self.subject})" if self.subject else ""
        return printable(f"{place}{path}{subject}: {self.what}; accepted: {self.accepted}")


class ConfigError(Exception):
    """The configuration is refused as a whole; `problems` are all of them, in the order of the files.

    Its text has one line each: `fleet.yaml:12 scalers[1].max_agents: what is wrong; accepted: what would do`.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "no problem, no error"
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:SHOWN_MOST]]
        if len(self.problems) > SHOWN_MOST:
            lines.append(f"... and {len(self.problems) - SHOWN_MOST} more problems")
        super().__init__("\n".join(lines))


def dotted(path: Path) -> str:
    """Return a path as people write it, such as `scalers[1].label_sets[0].labels`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:KEY_SHOWN_MOST]}" for part in path)
    return "".join(parts).removeprefix(".")


def printable(text: str) -> str:
    """Return the text on one line, with escapes for what would move a terminal's cursor or change its colours."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
