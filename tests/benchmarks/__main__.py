"""`python -m tests.benchmarks [NAME ...]`: measure, say how it goes on stderr, and print one table."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from infra.collector import collect_seldom
from tests.benchmarks.figures import Figure, table, with_figures
from tests.benchmarks.stage import FULL, QUICK, Stage, say

NAMES = ("append", "replay", "boot", "demand", "memory", "network", "microvm")
README = Path(__file__).with_name("README.md")


def main() -> int:
    """Run what was named, or all; the exit code is 0 also when a target is missed: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="small numbers, to see that it works: no figures to quote"
    )
    parser.add_argument(
        "--readme", action="store_true", help="also put the table in the place of the one in README.md"
    )
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}")
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # servers and folders are cleared away as at any end
    collect_seldom()  # as a coordinator has it, and for the baselines too
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="fleetlog-bench-") as root:
        Path(root).chmod(0o755)  # PostgreSQL runs as a user of its own, who must get through
        stage = Stage(Path(root), QUICK if options.quick else FULL)
        for name in options.names or NAMES:
            began = time.monotonic()
            say(f"{name}: begins; load {os.getloadavg()[0]:.2f}{_noise()}")
            module = importlib.import_module(f"tests.benchmarks.{name}")
            figures += module.measure(stage)
            say(f"{name}: done in {time.monotonic() - began:.0f} s; load {os.getloadavg()[0]:.2f}")
            if options.json is not None:
                options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    report = f"{_machine()}\n\n{table(figures)}\n"
    sys.stdout.write(report)
    if options.readme:
        README.write_text(with_figures(README.read_text(encoding="utf-8"), report), encoding="utf-8")
    return 0


def _noise() -> str:
    return " (others use this machine: figures will be worse than they are)" if os.getloadavg()[0] > 1 else ""


def _machine() -> str:
    cores = os.cpu_count()
    system = platform.uname()
    return f"{cores} cores, {system.system} {system.release} {system.machine}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
