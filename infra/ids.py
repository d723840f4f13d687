"""Ids and chance for real: the only place that draws them."""

import os
import secrets
from collections import deque
from datetime import datetime

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_TIME_DIGITS = 10
_CHANCE_DIGITS = 16
_ID_DIGITS = 32
_DRAWN_AT_ONCE = 256
"""Each draw is a system call that lets every other thread go first; one for many ids is 25 us less for each."""

_drawn: deque[str] = deque()
os.register_at_fork(after_in_child=_drawn.clear)


class SystemIds:
    """Ids from the kernel's random source."""

    def vm(self, at: datetime) -> str:
        """Return a new VM id: ten digits of milliseconds, then 80 random bits, as `a-` and 26 base 32 digits.

        Sorts by time, and two never meet: within one millisecond 80 bits are drawn.
        """
        milliseconds = int(at.timestamp() * 1000)
        chance = secrets.randbits(5 * _CHANCE_DIGITS)
        return "a-" + _base32(milliseconds, _TIME_DIGITS) + _base32(chance, _CHANCE_DIGITS)

    def random(self) -> str:
        """Return 128 random bits as 32 hex digits."""
        try:
            return _drawn.pop()  # atomic: no two threads get the same one
        except IndexError:
            digits = secrets.token_hex(_DRAWN_AT_ONCE * _ID_DIGITS // 2)
            first, *others = (digits[at : at + _ID_DIGITS] for at in range(0, len(digits), _ID_DIGITS))
            _drawn.extend(others)
            return first


def _base32(number: int, digits: int) -> str:
    text = ""
    for _ in range(digits):
        number, digit = divmod(number, 32)
        text = _DIGITS[digit] + text
    return text
