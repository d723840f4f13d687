"""The smallest machines there are: kernels of a few bytes that halt, or say one text and then halt, reset or repeat it."""

import struct
from pathlib import Path
from typing import Literal

_AT = 0x1000000  # where a 64-bit kernel of Linux's boot protocol begins
_HEADER_BYTES, _SEGMENT_BYTES = 64, 56
_HALT = bytes((0xFA, 0xF4, 0xEB, 0xFD))  # cli; hlt; and again
_RESET = bytes(
    (0xB0, 0xFE, 0xE6, 0x64)
)  # mov al,0xfe; out 0x64,al: the keyboard controller pulls the reset line
Then = Literal["halt", "reset", "repeat"]


def write_halting_kernel(path: Path) -> Path:
    """Write a kernel that writes nothing and never ends by itself, and return it."""
    return _write(path, _HALT)


def write_speaking_kernel(path: Path, text: str, then: Then = "halt") -> Path:
    """Write a kernel that says the text on the serial port, and return it."""
    # lodsb; test al,al; jz +7; mov dx,0x3f8; out dx,al; jmp back
    loop = bytes((0xAC, 0x84, 0xC0, 0x74, 0x07, 0x66, 0xBA, 0xF8, 0x03, 0xEE, 0xEB, 0xF4))
    end = {"halt": _HALT, "reset": _RESET + _HALT, "repeat": b""}[then]
    if then == "repeat":
        end = bytes((0xEB, 256 - (7 + len(loop) + 2)))  # jmp to the very beginning
    rest = loop + end
    return _write(path, b"\x48\x8d\x35" + struct.pack("<i", len(rest)) + rest + text.encode() + b"\0")


def _write(path: Path, code: bytes) -> Path:
    offset = 0x1000
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, _AT, _HEADER_BYTES, 0, 0, _HEADER_BYTES, _SEGMENT_BYTES, 1, 64, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, offset, _AT, _AT, len(code), len(code), 0x1000)
    path.write_bytes((header + segment).ljust(offset, b"\0") + code)
    return path
