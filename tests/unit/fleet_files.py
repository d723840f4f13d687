"""Fleet files as the tests of the configuration write them, and their problems as they read."""

from collections.abc import Callable
from pathlib import Path

from infra.config.load import Report

Write = Callable[..., Path]


def metal(name: str = "metal", labels: str = "[linux]", more: str = "", in_set: str = "") -> str:
    return f"""\
  - name: {name}
    backend: bare-metal
    max_agents: 2
{more}    label_sets:
      - labels: {labels}
        binary_path: /bin/agent
{in_set}"""


def fleet(*scalers: str, more: str = "") -> str:
    return f"version: 1\n{more}scalers:\n" + "".join(scalers)


def lines(report: Report, path: Path) -> list[str]:
    assert (report.config is None) == bool(report.problems)
    return [str(problem).replace(str(path), path.name) for problem in report.problems]


def only(report: Report, path: Path) -> str:
    (line,) = lines(report, path)
    return line
