"""The smallest machine there is: a kernel that halts at once, writes nothing and never ends by itself."""

import struct
from pathlib import Path

_AT = 0x1000000  # where a 64-bit kernel of Linux's boot protocol begins
_CODE = bytes((0xFA, 0xF4, 0xEB, 0xFD))  # cli; hlt; and again
_HEADER_BYTES, _SEGMENT_BYTES = 64, 56


def write_halting_kernel(path: Path) -> Path:
    """Write an ELF file that Firecracker starts, and return it."""
    offset = 0x1000
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, _AT, _HEADER_BYTES, 0, 0, _HEADER_BYTES, _SEGMENT_BYTES, 1, 64, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, offset, _AT, _AT, len(_CODE), len(_CODE), 0x1000)
    path.write_bytes((header + segment).ljust(offset, b"\0") + _CODE)
    return path
