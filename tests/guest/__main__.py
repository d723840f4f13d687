"""`python -m tests.guest FOLDER`: what a fleet file of microVMs needs to be tried, with the test guest for a kernel."""

import shutil
import sys
from pathlib import Path

from tests.guest.binaries import FetchFailed, fetch_binaries
from tests.guest.build import BuildFailed, build_guest
from tests.guest.rootfs import make_rootfs


def main() -> None:
    """Put `firecracker`, `jailer`, `vmlinux` and `rootfs.ext4` into the folder, for every user to read."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(sys.executable).name} -m tests.guest FOLDER")
    folder = Path(sys.argv[1])
    try:
        found = fetch_binaries()
        programs = {"firecracker": found.firecracker, "jailer": found.jailer, "vmlinux": build_guest()}
    except (FetchFailed, BuildFailed) as error:
        sys.exit(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in programs.items():
        (folder / name).unlink(missing_ok=True)  # a program that runs cannot be written over
        shutil.copyfile(path, folder / name)
        (folder / name).chmod(0o755)
    if not (folder / "rootfs.ext4").exists():
        make_rootfs(folder / "rootfs.ext4").chmod(0o644)


if __name__ == "__main__":
    main()
