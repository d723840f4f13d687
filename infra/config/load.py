"""Loads a fleet file and its drop-ins: all of it, or one error with every problem."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from actors.decisions.labels import label_key, shown
from infra.config import source
from infra.config.backends import BACKENDS, Backends
from infra.config.fleet import FleetConfig
from infra.config.kinds import FORMS
from infra.config.problems import ConfigError, Problem, dotted
from infra.config.problems import Path as KeyPath
from infra.config.scaler import LabelSet, ScalerConfig
from infra.config.walker import Walker

DROP_INS_MOST = 256

_SUFFIXES = (".yaml", ".yml")
_A_LIST = "a list of scalers, which may be empty: []"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found. `config` is None exactly when there are problems."""

    config: FleetConfig | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    files: tuple[str, ...]


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One scaler as written, where it stands in its own file, and what was read from it."""

    node: source.Node
    path: KeyPath
    subject: str
    scaler: ScalerConfig


def load(
    main_path: str | Path, directory: str | Path | None = None, backends: Backends = BACKENDS
) -> FleetConfig:
    """Return the configuration, or refuse it as a whole.

    The main file's scalers come first, then those of the directory's files that end in .yaml or .yml, in plain
    order of their names. A drop-in may be empty, or holds `scalers` and nothing else: unknown keys are refused
    everywhere, so a setting there that would have no effect is an error and not ignored.

    Raises:
        ConfigError: with every problem there is; nothing is loaded in part.
    """
    report = check(main_path, directory, backends)
    if report.config is None:
        raise ConfigError(report.problems)
    return report.config


def check(
    main_path: str | Path, directory: str | Path | None = None, backends: Backends = BACKENDS
) -> Report:
    """Return the configuration or all that is wrong with it, and what is allowed and probably not meant."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    main = Path(main_path)
    drop_ins = () if directory is None else _drop_ins(Path(directory), problems)
    root, lists = _read(main, drop_ins, problems)
    walker = Walker(FORMS, problems)
    config = None if root is None else walker.read(FleetConfig, root, ())
    entries = [_entry(walker, backends, node, path) for node, path in _items(walker, lists)]
    _check_names(walker, entries)
    _check_overlaps(walker, entries)
    for entry in entries:
        _check_scaler(walker, entry)
        warnings.extend(_warnings(entry))
    if problems or config is None:
        config = None
    else:
        config = msgspec.structs.replace(config, scalers=tuple(entry.scaler for entry in entries))
    order = {str(path): index for index, path in enumerate((main, *drop_ins))}
    problems.sort(key=lambda problem: (order.get(problem.file, len(order)), problem.line))
    return Report(
        config=config,
        problems=tuple(problems),
        warnings=tuple(warnings),
        files=tuple(str(path) for path in (main, *drop_ins)),
    )


def _drop_ins(directory: Path, problems: list[Problem]) -> tuple[Path, ...]:
    accepted = "a readable directory; leave it out if there are no drop-in files"
    try:
        # A broken link is kept: reading it says so, and silence would lose a scaler.
        found = [path for path in directory.iterdir() if path.suffix in _SUFFIXES and not path.is_dir()]
    except OSError as error:
        what = f"cannot be listed: {error.strerror or type(error).__name__}"
        problems.append(Problem(file=str(directory), line=0, path="", what=what, accepted=accepted))
        return ()
    if len(found) > DROP_INS_MOST:
        what, accepted = f"{len(found)} drop-in files", f"at most {DROP_INS_MOST}"
        problems.append(Problem(file=str(directory), line=0, path="", what=what, accepted=accepted))
    return tuple(sorted(found, key=lambda path: path.name)[:DROP_INS_MOST])


def _read(
    main: Path, drop_ins: tuple[Path, ...], problems: list[Problem]
) -> tuple[source.Mapping | None, list[source.Node]]:
    """Return the main file without its scalers, and every list of scalers there is."""
    lists: list[source.Node] = []
    before = len(problems)
    root = source.read(main, problems)
    if root is None and len(problems) == before:
        what, accepted = "the file is empty", "at least `version: 1` and `scalers: []`"
        problems.append(Problem(file=str(main), line=0, path="", what=what, accepted=accepted))
    settings = _mapping(root, problems, "a mapping with `version: 1` and `scalers`")
    if settings is not None and "scalers" in settings.entries:
        lists.append(settings.entries["scalers"])
        rest = {key: node for key, node in settings.entries.items() if key != "scalers"}
        settings = msgspec.structs.replace(settings, entries=rest)
    for path in drop_ins:
        drop_in = _mapping(source.read(path, problems), problems, "a mapping with `scalers` alone")
        for key, node in () if drop_in is None else drop_in.entries.items():
            if key == "scalers":
                lists.append(node)
                continue
            what = "a drop-in file may only have scalers"
            problem = Problem(
                file=node.file, line=node.line, path=key, what=what, accepted=f"it in {main.name}"
            )
            problems.append(problem)
    if settings is not None and not lists:
        problem = Problem(file=str(main), line=0, path="scalers", what="missing", accepted=_A_LIST)
        problems.append(problem)
    return settings, lists


def _mapping(node: source.Node | None, problems: list[Problem], accepted: str) -> source.Mapping | None:
    if node is None or isinstance(node, source.Mapping):
        return node
    problem = Problem(file=node.file, line=node.line, path="", what="not a mapping", accepted=accepted)
    problems.append(problem)
    return None


def _items(walker: Walker, lists: list[source.Node]) -> Iterator[tuple[source.Node, KeyPath]]:
    for node in lists:
        if isinstance(node, source.Sequence):
            for index, item in enumerate(node.items):
                yield item, ("scalers", index)
        else:
            walker.note(node, ("scalers",), "not a list", _A_LIST)


def _entry(walker: Walker, backends: Backends, node: source.Node, path: KeyPath) -> _Entry:
    name = source.at(node, ("name",))
    named = isinstance(name, source.Scalar) and name is not node
    walker.subject = f"scaler {name.text[:63]}" if named and isinstance(name, source.Scalar) else ""
    cls = _struct(walker, backends, node, path)
    # Of a backend that is not there only the shared keys can be judged.
    judged = _shared(node) if cls is None else node
    scaler = walker.read(ScalerConfig if cls is None else cls, judged, path)
    entry = _Entry(node=node, path=path, subject=walker.subject, scaler=scaler)
    walker.subject = ""
    return entry


def _struct(
    walker: Walker, backends: Backends, node: source.Node, path: KeyPath
) -> type[ScalerConfig] | None:
    backend = source.at(node, ("backend",))
    if not isinstance(node, source.Mapping) or backend is node:
        return next(iter(backends.values())) if len(backends) == 1 else None
    value = backend.value if isinstance(backend, source.Scalar) else None
    if isinstance(value, str) and value in backends:
        return backends[value]
    accepted = ("one of " if len(backends) > 1 else "") + ", ".join(sorted(backends))
    what = f'"{value[:63]}" is not a backend of this release' if isinstance(value, str) else "not a word"
    walker.note(backend, (*path, "backend"), what, accepted)
    return None


def _shared(node: source.Node) -> source.Node:
    """Return the scaler with only the keys that every backend has."""
    if not isinstance(node, source.Mapping):
        return node
    entries = {key: below for key, below in node.entries.items() if key in ScalerConfig.__struct_fields__}
    sets = entries.get("label_sets")
    if isinstance(sets, source.Sequence):
        items = tuple(
            msgspec.structs.replace(
                item,
                entries={k: v for k, v in item.entries.items() if k in LabelSet.__struct_fields__},
            )
            if isinstance(item, source.Mapping)
            else item
            for item in sets.items
        )
        entries["label_sets"] = msgspec.structs.replace(sets, items=items)
    return msgspec.structs.replace(node, entries=entries)


def _place(entry: _Entry, path: KeyPath) -> str:
    node = source.at(entry.node, path)
    return f"{node.file}:{node.line} {dotted((*entry.path, *path))}"


def _check_names(walker: Walker, entries: list[_Entry]) -> None:
    first: dict[str, _Entry] = {}
    for entry in entries:
        name = entry.scaler.name
        if name and name in first:
            walker.subject = entry.subject
            what = f"scaler {name} is already at {_place(first[name], ('name',))}"
            walker.note(source.at(entry.node, ("name",)), (*entry.path, "name"), what, "a name of its own")
        first.setdefault(name, entry)
    walker.subject = ""


def _check_overlaps(walker: Walker, entries: list[_Entry]) -> None:
    """Two scalers with the same label set would make it chance which of them takes a job."""
    first: dict[str, tuple[int, _Entry, KeyPath]] = {}
    for number, entry in enumerate(entries):
        for index, label_set in enumerate(entry.scaler.label_sets):
            path: KeyPath = ("label_sets", index, "labels")
            if walker.knows(source.at(entry.node, path), (*entry.path, *path)):
                continue  # what is left of it means nothing
            key = label_key(label_set.labels)
            owner, other, there = first.setdefault(key, (number, entry, path))
            if owner != number:
                what = f"{shown(label_set.labels)} is already at {_place(other, there)}"
                accepted = "a label set that no other scaler has"
                walker.subject = entry.subject
                walker.note(source.at(entry.node, path), (*entry.path, *path), what, accepted)
    walker.subject = ""


def _check_scaler(walker: Walker, entry: _Entry) -> None:
    walker.subject = entry.subject
    for finding in entry.scaler.findings():
        node = source.at(entry.node, finding.path)
        walker.note(node, (*entry.path, *finding.path), finding.what, finding.accepted)
    walker.subject = ""


def _warnings(entry: _Entry) -> Iterator[Problem]:
    for finding in entry.scaler.warnings():
        node = source.at(entry.node, finding.path)
        yield Problem(
            file=node.file,
            line=node.line,
            path=dotted((*entry.path, *finding.path)),
            what=finding.what,
            accepted=finding.accepted,
            subject=entry.subject,
        )
