"""Ids and chance for real: the only place that draws them."""

import secrets
from datetime import datetime

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_TIME_DIGITS = 10
_CHANCE_DIGITS = 16


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
        return secrets.token_hex(16)


def _base32(number: int, digits: int) -> str:
    text = ""
    for _ in range(digits):
        number, digit = divmod(number, 32)
        text = _DIGITS[digit] + text
    return text
