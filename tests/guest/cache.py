"""Files made or fetched once and kept, in a folder that git ignores."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(__file__).parent / ".cache"


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """Return the file of that name, made by `make(path)` if it is not there.

    Whoever is interrupted leaves no half file behind, and two who make the same at once both get a whole one.
    """
    path = CACHE / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            made = Path(directory) / path.name
            make(made)
            os.replace(made, path)  # noqa: PTH105 - the one call that is atomic
    return path
