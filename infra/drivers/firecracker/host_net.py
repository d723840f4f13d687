"""What the Firecracker driver needs of the host's network; `infra.network` does it."""

from typing import Protocol

from actors.decisions.addresses import Lease
from infra.network.policy import Policy


class HostNet(Protocol):
    """TAPs on the bridge, and the rules that bind and fence their addresses."""

    def attach(self, lease: Lease, policy: Policy, uid: int, gid: int) -> None:
        """Have the lease's TAP up, isolated, to be opened by this user only, with its policy in force before that.

        Raises:
            DriverError: nothing of it is left in force.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Take policy and TAP away, or keep the TAP down for the address's next holder. Repeatable.

        Raises:
            DriverError: some of it may be left.
        """
        ...
