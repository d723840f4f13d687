"""YAML files as trees that know the line of every value and refuse duplicate keys."""

from pathlib import Path

import msgspec
import yaml

from infra.config.problems import Path as KeyPath
from infra.config.problems import Problem, dotted

FILE_MOST_BYTES = 1024 * 1024
DEPTH_MOST = 32
VALUES_MOST = 100_000
"""Values one file may unfold to; aliases of aliases grow without bound."""

_TAG = "tag:yaml.org,2002:"
_PLAIN = frozenset({"int", "float", "bool", "null"})


class Scalar(msgspec.Struct, frozen=True, kw_only=True):
    """One value; `text` is how it was written."""

    file: str
    line: int
    value: str | int | float | bool | None
    text: str


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """A list."""

    file: str
    line: int
    items: tuple["Node", ...]


class Mapping(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values; a value's line is its key's."""

    file: str
    line: int
    entries: dict[str, "Node"]


Node = Scalar | Sequence | Mapping


def read(path: Path, problems: list[Problem]) -> Node | None:
    """Return the file's tree, or None when it is empty or cannot be read at all.

    Adds to `problems` what keeps it from being read, and every duplicate key. Quotes nothing from the file
    but keys: values may be secret.
    """
    file = str(path)
    text = _text(path, problems)
    if text is None:
        return None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None or root.tag == f"{_TAG}null":
            return None
        return _Unfolding(file, loader, problems).unfold(root, (), None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        _add(problems, file, line, f"not YAML: {error.problem or error.context}", "one YAML document")
    except RecursionError:
        _add(problems, file, 0, "nested too deeply", f"at most {DEPTH_MOST} levels")
    finally:
        loader.dispose()
    return None


def at(node: Node, path: KeyPath) -> Node:
    """Return the node at `path`, or the nearest one above it that exists."""
    for part in path:
        below: Node | None = None
        if isinstance(node, Mapping) and isinstance(part, str):
            below = node.entries.get(part)
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            below = node.items[part]
        if below is None:
            return node
        node = below
    return node


def _text(path: Path, problems: list[Problem]) -> str | None:
    file, accepted = str(path), f"a readable YAML file in UTF-8, at most {FILE_MOST_BYTES // 1024} KiB"
    try:
        if path.exists() and not path.is_file():  # a named pipe would keep us waiting
            _add(problems, file, 0, "not a regular file", accepted)
            return None
        with path.open("rb") as stream:
            raw = stream.read(FILE_MOST_BYTES + 1)
    except OSError as error:
        _add(problems, file, 0, f"cannot be read: {error.strerror or type(error).__name__}", accepted)
        return None
    if len(raw) > FILE_MOST_BYTES:
        _add(problems, file, 0, "the file is too big", accepted)
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _add(problems, file, raw.count(b"\n", 0, error.start) + 1, "not UTF-8", accepted)
        return None
    if (odd := yaml.reader.Reader.NON_PRINTABLE.search(text)) is not None:
        line = text.count("\n", 0, odd.start()) + 1
        _add(problems, file, line, f"the control character U+{ord(odd[0]):04X}", accepted)
        return None
    return text


def _add(
    problems: list[Problem], file: str, line: int, what: str, accepted: str, *, path: KeyPath = ()
) -> None:
    problems.append(Problem(file=file, line=line, path=dotted(path), what=what, accepted=accepted))


class _Unfolding:
    """Turns one composed document into our tree, counting what aliases unfold to."""

    def __init__(self, file: str, loader: yaml.SafeLoader, problems: list[Problem]) -> None:
        self._file = file
        self._loader = loader
        self._problems = problems
        self._left = VALUES_MOST

    def unfold(self, node: yaml.Node, path: KeyPath, key_line: int | None) -> Node | None:
        """Return the tree below `node`, or None with a problem added."""
        line = node.start_mark.line + 1 if key_line is None else key_line
        self._left -= 1
        if self._left < 0 or len(path) > DEPTH_MOST:
            if self._left >= -1:  # said once, not for each of the values beyond
                limits = f"at most {VALUES_MOST} values and {DEPTH_MOST} levels, aliases unfolded"
                _add(self._problems, self._file, line, "too much for a fleet file", limits, path=path)
                self._left = -2
            return None
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path, line)
            case yaml.SequenceNode():
                found = [self.unfold(item, (*path, index), None) for index, item in enumerate(node.value)]
                items = tuple(item for item in found if item is not None)
                return Sequence(file=self._file, line=line, items=items)
            case _:
                return self._scalar(node, path, line)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, line: int) -> Mapping:
        entries: dict[str, Node] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                _add(
                    self._problems,
                    self._file,
                    key_line,
                    "a key that is not a word",
                    "words as keys",
                    path=path,
                )
                continue
            key = str(key_node.value)
            if key in first:
                what = f"the key is given twice, first in line {first[key]}"
                _add(self._problems, self._file, key_line, what, "each key once", path=(*path, key))
                continue
            first[key] = key_line
            value = self.unfold(value_node, (*path, key), key_line)
            if value is not None:
                entries[key] = value
        return Mapping(file=self._file, line=line, entries=entries)

    def _scalar(self, node: yaml.Node, path: KeyPath, line: int) -> Scalar | None:
        text, kind = str(node.value), str(node.tag).removeprefix(_TAG)
        # YAML reads 2026-01-01 as a date; nothing here is one, so it stays the text it looks like.
        value: str | int | float | bool | None = text
        if kind in _PLAIN:
            try:
                value = self._loader.construct_object(node)
            except (ValueError, KeyError):
                _add(self._problems, self._file, line, f"not a valid {kind}", "plain YAML values", path=path)
                return None
        elif kind not in {"str", "timestamp"}:
            _add(self._problems, self._file, line, f"the YAML tag {node.tag}", "plain YAML values", path=path)
            return None
        return Scalar(file=self._file, line=line, value=value, text=text)
