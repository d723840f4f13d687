"""What a projector needs to know of a read model: a name, a version, the rows and how facts change them."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from events.envelope import Recorded

RowT = TypeVar("RowT", bound=msgspec.Struct)


class View(Protocol[RowT]):
    """A read model as a pure fold, one row per key.

    `version` rises when rows would come out differently from the same facts: the projector then starts the
    view from sequence 0. Facts that do not concern the view have no key.
    """

    @property
    def name(self) -> str:
        """Return the view's name, which is its table's."""
        ...

    @property
    def version(self) -> int:
        """Return the version of the fold."""
        ...

    @property
    def row_type(self) -> type[RowT]:
        """Return the struct whose fields are the table's columns."""
        ...

    def keys(self, fact: Recorded) -> Iterable[str]:
        """Return the keys of the rows that `fact` changes."""
        ...

    def evolve(self, row: RowT | None, key: str, fact: Recorded) -> RowT | None:
        """Return the row after `fact`; None deletes it.

        Raises:
            BrokenLog: the facts do not follow one another; the view stops loudly.
        """
        ...
