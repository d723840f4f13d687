"""A network namespace for the demonstration's microVMs: the host's own interfaces and rules stay untouched."""

import ctypes
import os
import subprocess

from infra.demo.plays import NotHere

_CLONE_NEWNET = 0x40000000
_SETUP = """\
link set lo up
link add out0 type veth peer name out1
addr add 198.18.0.1/30 dev out0
link set out0 up
link set out1 up
route add default via 198.18.0.2
"""
"""A way out that leads nowhere: a host network is only made ready where there is one. 198.18/15 is for tests."""


def enter_own_network() -> None:
    """Move this process, and all it starts from here on, into a network namespace that ends with them.

    Raises:
        NotHere: we are not root, or the kernel or iproute2 will not do it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise NotHere(
            f"the microVM demonstration makes a network namespace of its own, and may not: {reason}; run it as root"
        )
    try:
        subprocess.run(
            ["ip", "-batch", "-"], input=_SETUP, text=True, check=True, capture_output=True, timeout=30
        )
    except FileNotFoundError as error:
        raise NotHere("microVMs need the program ip: apt-get install iproute2 nftables") from error
    except subprocess.CalledProcessError as error:
        raise NotHere(f"the network namespace could not be set up: {error.stderr.strip()}") from error
