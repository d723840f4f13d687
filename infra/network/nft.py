"""The `nft` program: applies text as one transaction, and lists as JSON."""

from typing import Any

import msgspec

from actors.errors import DriverError
from infra.network.commands import NFT_TIMEOUT_S, CommandFailed, Commands


class Nft(msgspec.Struct, frozen=True, kw_only=True):
    """`nft` in one namespace."""

    commands: Commands

    def apply(self, script: str) -> None:
        """Carry out the script: all of it or nothing.

        Raises:
            CommandFailed: nft refused it.
        """
        self.commands.run("nft", "-f", "-", stdin=script + "\n", timeout_s=NFT_TIMEOUT_S)

    def listing(self, *what: str) -> list[dict[str, Any]]:
        """Return what `nft list …` has, numbers as numbers; sets without their elements unless a set is asked for.

        Raises:
            CommandFailed: there is no such thing.
        """
        terse = () if what[:1] == ("set",) else ("-t",)
        listed = self.commands.run("nft", "-j", "-n", "-a", *terse, "list", *what, timeout_s=NFT_TIMEOUT_S)
        found: list[dict[str, Any]] = msgspec.json.decode(listed)["nftables"]
        return found

    def check(self) -> None:
        """Refuse a host where we cannot filter: isolation is not optional.

        Raises:
            DriverError: nft is not installed, we lack the right, or it does not work.
        """
        try:
            self.commands.run("nft", "list", "tables", timeout_s=NFT_TIMEOUT_S)
        except CommandFailed as error:
            if error.kind == "missing":
                raise
            if error.kind == "refused":
                message = f"nft may not be used: {error}; it needs CAP_NET_ADMIN"
                raise DriverError("refused", message, transient=False) from error
            message = f"nft does not work on this host: {error}"
            raise DriverError(error.kind, message, transient=error.transient) from error
