"""Builds the guest from its sources, once for each content of them."""

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.guest.cache import kept

SOURCES = Path(__file__).parent / "src"
_FLAGS = (
    "-std=c11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-ffreestanding",
    "-fno-strict-aliasing",  # headers are read as words of other widths than they were written in
    "-fno-pic",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fno-asynchronous-unwind-tables",
    "-mno-red-zone",  # interrupts push onto the stack of whoever sleeps
    "-mgeneral-regs-only",  # KVMs that emulate the guest know no vector instructions
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,--build-id=none",
    "-Wl,-z,max-page-size=4096",
)
_TIMEOUT_S = 60


class BuildFailed(Exception):  # noqa: N818 - a state of this host, not an accident
    """The guest cannot be built here; the message says what is missing or wrong."""


def build_guest() -> Path:
    """Return the guest, an ELF file to be given to Firecracker as its kernel.

    Raises:
        BuildFailed: no compiler, or the sources are wrong.
    """
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return kept(f"guest-{digest.hexdigest()[:16]}.elf", _compile)


def _compile(target: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        raise BuildFailed("no C compiler to build the test guest with: apt-get install gcc")
    sources = [str(source) for source in sorted(SOURCES.iterdir()) if source.suffix in (".c", ".S")]
    command = [gcc, *_FLAGS, f"-Wl,-T,{SOURCES / 'guest.ld'}", "-o", str(target), *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"gcc cannot build the test guest in {SOURCES}:\n{done.stderr}")
