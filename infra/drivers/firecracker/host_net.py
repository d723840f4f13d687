"""What the Firecracker driver needs of the host's network; `infra.network` does it."""

from typing import Protocol

from actors.decisions.addresses import Lease
from infra.network.policy import Policy


class HostNet(Protocol):
    """TAPs on the bridge, and the rules that bind and fence their addresses. Every call can be repeated.

    Raises:
        DriverError: any of them; what was done so far is undone by `clear_policy` and `release`.
    """

    def set_policy(self, lease: Lease, policy: Policy) -> None:
        """Let the address reach this and nothing else, whatever an earlier holder was let."""
        ...

    def attach(self, lease: Lease, uid: int, gid: int) -> None:
        """Have the lease's TAP up, isolated, on the bridge, and to be opened by this user only."""
        ...

    def clear_policy(self, lease: Lease) -> None:
        """Forget all that was said of the address."""
        ...

    def release(self, lease: Lease) -> None:
        """Take the TAP away, or keep it down for the address's next holder."""
        ...
