"""What the Firecracker driver needs of the host's network; `infra.network` does it."""

from typing import Protocol

import msgspec

from actors.decisions.addresses import Lease


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine may reach. `host_access` None: the network's default; empty: nothing on the host."""

    allowlist: tuple[str, ...] = ()
    deny_all: bool = False
    host_access: tuple[str, ...] | None = None


class HostNet(Protocol):
    """TAPs on the bridge and the rules that bind and fence them. All calls are idempotent and raise DriverError."""

    def attach(self, lease: Lease, uid: int, gid: int) -> None:
        """Have the lease's TAP up, isolated, on the bridge, and to be opened by this user only."""
        ...

    def set_policy(self, lease: Lease, policy: Policy) -> None:
        """Let the address reach this and nothing else, whatever an earlier holder was let."""
        ...

    def clear_policy(self, lease: Lease) -> None:
        """Forget all that was said of the address."""
        ...

    def release(self, lease: Lease) -> None:
        """Take the TAP away, or keep it down for the address's next holder."""
        ...

    def ports_free(self) -> int:
        """Return how many more TAPs the bridge takes."""
        ...


class NoNet:
    """Touches nothing: the TAPs are there already."""

    def attach(self, lease: Lease, uid: int, gid: int) -> None:
        """Do nothing."""

    def set_policy(self, lease: Lease, policy: Policy) -> None:
        """Do nothing."""

    def clear_policy(self, lease: Lease) -> None:
        """Do nothing."""

    def release(self, lease: Lease) -> None:
        """Do nothing."""

    def ports_free(self) -> int:
        """Return 1."""
        return 1
