"""Makes TAPs: kept devices that one user may open."""

import errno
import fcntl
import os
import struct

from actors.errors import DriverError

DEVICE = "/dev/net/tun"

_SET_IFF, _SET_PERSIST, _SET_OWNER, _SET_GROUP = 0x400454CA, 0x400454CB, 0x400454CC, 0x400454CE
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_REQUEST = struct.Struct("16sH22x")


def make_tap(name: str, uid: int, gid: int) -> None:
    """Make the TAP in this thread's namespace, or give an existing one to another owner. It outlives us.

    Raises:
        DriverError: no TUN here, no right, the name is another interface's, or a process still has the TAP open.
    """
    try:
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise no_tun(error) from error
    try:
        fcntl.ioctl(descriptor, _SET_IFF, _REQUEST.pack(name.encode(), _IFF_TAP | _IFF_NO_PI))
        fcntl.ioctl(descriptor, _SET_OWNER, uid)
        fcntl.ioctl(descriptor, _SET_GROUP, gid)
        fcntl.ioctl(descriptor, _SET_PERSIST, 1)
    except OSError as error:
        raise _refused(name, error) from error
    finally:
        os.close(descriptor)


def no_tun(error: OSError) -> DriverError:
    """Return what it means that the TUN device cannot be opened."""
    if error.errno in {errno.ENOENT, errno.ENODEV, errno.ENXIO}:
        message = f"{DEVICE} is not there: load the kernel module `tun` (modprobe tun), or pass the device in"
        return DriverError("missing", message, transient=False)
    message = f"{DEVICE} cannot be opened: {error.strerror}; run as root or set use_sudo"
    return DriverError("refused", message, transient=False)


def tap_open(name: str) -> DriverError:
    """Return what it means that a process holds the TAP."""
    message = f"TAP {name} is still open in another process: its last machine has not ended"
    return DriverError("still-there", message, transient=True)


def _refused(name: str, error: OSError) -> DriverError:
    if error.errno == errno.EBUSY:
        return tap_open(name)
    if error.errno == errno.EINVAL:
        message = f"{name} is another kind of interface: remove it with `ip link del {name}`"
        return DriverError("refused", message, transient=False)
    if error.errno == errno.EPERM:
        message = f"TAP {name} cannot be made: {error.strerror}; it needs CAP_NET_ADMIN: run as root or set use_sudo"
        return DriverError("refused", message, transient=False)
    return DriverError("unknown", f"TAP {name} cannot be made: {error.strerror}", transient=True)
