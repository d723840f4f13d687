"""Label values, bounded: a word outside a label's small vocabulary is exported as `other`, whoever made it up."""

from collections.abc import Iterable

OTHER = "other"


class Vocabulary:
    """The values one label may have: the known ones and, while there is room, new ones as they come.

    `room` 0 closes it. The empty value means that the label is not set, and is always allowed. Not thread safe.
    """

    def __init__(self, known: Iterable[str] = (), *, room: int = 0) -> None:
        self._words = {"", OTHER, *known}
        self._room = room

    def add(self, words: Iterable[str], most: int) -> None:
        """Make more words known, up to `most` in all."""
        for word in words:
            if len(self._words) < most:
                self._words.add(word)

    def word(self, value: str) -> str:
        """Return the value if it may be exported, else `other`."""
        if value in self._words:
            return value
        if self._room <= 0:
            return OTHER
        self._room -= 1
        self._words.add(value)
        return value
