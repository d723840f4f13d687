"""The house holds its own rules: names nobody else installs, sizes, subjects spelled once, no address of a machine."""

import ast
import importlib.metadata
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from events.codec import EVENT_TYPES, TAGS

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("events", "projections", "actors", "infra")

MODULE_LINES_MOST = 400
TEST_MODULE_LINES_MOST = 500
"""A suite of one subject may be longer: its parts are read one by one."""

FUNCTION_LINES_MOST = 70

MACHINE_PATHS = re.compile(r"(?<![\w.}*])/(?:home|root|work|Users)/[\w.-]")
REGISTRY_HOSTS = re.compile(
    r"pypi\.org|python[h]osted|registry\.npm|deb\.debian|ghcr\.io|docker\.io/|://[^/\s]*mirror"
)
SEEN = {
    ".py",
    ".md",
    ".toml",
    ".sql",
    ".html",
    ".json",
    ".jsonl",
    ".lock",
    ".yaml",
    ".yml",
    ".txt",
    ".css",
    ".js",
    "",
}


def _modules(*folders: str) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ".cache" in path.parts:
                continue  # what tests and benchmarks fetch is nobody's here
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def _tracked() -> list[Path]:
    """Return the files of the repository; of a copy without git, those of its visible folders."""
    if not (ROOT / ".git").exists():
        return [
            path.relative_to(ROOT)
            for path in ROOT.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("name", FLOORS)
def test_no_other_distribution_installs_a_package_of_our_name(name: str) -> None:
    """Whoever else provides it would shadow or overwrite ours, and every other test would stay green."""
    providers = set(importlib.metadata.packages_distributions().get(name, ()))
    assert providers <= {"fleetlog"}, f"{name} is also provided by {providers - {'fleetlog'}}: uninstall that"


def test_no_module_is_longer_than_the_limit() -> None:
    too_long = {
        str(path): len(text.splitlines())
        for floors, most in ((FLOORS, MODULE_LINES_MOST), (("tests",), TEST_MODULE_LINES_MOST))
        for path, text in _modules(*floors)
        if len(text.splitlines()) > most
    }
    assert not too_long, f"split by what they say: {too_long}"


def test_no_function_is_longer_than_the_limit() -> None:
    too_long = [
        f"{path}:{node.lineno} {node.name} ({length} lines)"
        for path, text in _modules(*FLOORS, "tests")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MOST
    ]
    assert not too_long, f"longer than {FUNCTION_LINES_MOST} lines: {too_long}"


def test_every_module_of_the_four_floors_states_its_one_job() -> None:
    silent = [str(path) for path, text in _modules(*FLOORS) if not ast.get_docstring(ast.parse(text))]
    assert not silent


def test_tags_are_unique_and_say_what_happened_to_what() -> None:
    assert len(TAGS) == len(EVENT_TYPES), "two event classes share a tag"
    odd = [tag for tag in TAGS if not re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", tag)]
    assert not odd, f"a tag is `noun.past_tense`: {odd}"


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of string literals, parts of f-strings included; docstrings and loggers' names are neither."""
    passed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(id(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("logging.getLogger", "getLogger"):
            passed.update(id(argument) for argument in node.args)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.lineno, node.value


def test_a_subject_is_spelled_in_one_module_only() -> None:
    found = [
        f"{path}:{line} {text!r}"
        for path, source in _modules(*FLOORS)
        if path != Path("events/subjects.py")
        for line, text in _texts(ast.parse(source))
        if re.match(r"fleetlog\.|FLEETLOG_\{|\$JS\.API\..*fleetlog", text)
    ]
    assert not found, f"add a function to events/subjects.py instead: {found}"


def _crash_points() -> list[str]:
    return [
        ast.unparse(call.args[0])
        for _, text in _modules("actors", "infra")
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "reach"
    ]


def test_each_crash_point_has_a_name_of_its_own() -> None:
    points = Counter(_crash_points())
    assert len(points) >= 6, "the scan no longer finds the crash points"
    assert not [name for name, count in points.items() if count > 1]


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in _tracked():
        if path.suffix not in SEEN:
            continue
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line):
                found.append(f"{path}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_the_lock_is_hashed_and_holds_no_addresses() -> None:
    names = {path.name for path in _tracked()}
    assert not names & {"uv.lock", "pylock.toml", "poetry.lock"}, "these embed registry addresses"
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)
    pinned = [entry for entry in entries if "==" in entry.splitlines()[0]]
    assert len(pinned) > 20, "the scan no longer finds the packages"
    assert not [entry.splitlines()[0] for entry in pinned if "--hash=sha256:" not in entry]
