"""The keys of the embedded NATS: made once, kept with mode 0600, found again at the next start."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from infra.credentials import ACCOUNT, OPERATOR, AccountSigner, Entropy, new_seed, public_key
from infra.embedded.errors import DataDirectoryRefused
from infra.embedded.files import private_directory, write_private


@dataclass(frozen=True)
class Keys:
    """Seeds of the operator, the account that everything lives in, the server's system account, and agents.

    `agents` is a signing key of the account and mints what agents connect with: the same way as with an
    external NATS, where that key is all we are given.
    """

    operator: str = field(repr=False)
    account: str = field(repr=False)
    system: str = field(repr=False)
    agents: str = field(repr=False)

    @property
    def account_public(self) -> str:
        """The account's identity, `A...`."""
        return public_key(self.account)

    @property
    def account_signer(self) -> AccountSigner:
        """Mints users of the account with the account's own key: the coordinator, the operator, auditors."""
        return AccountSigner(seed=self.account, account_public=self.account_public)

    @property
    def agent_signer(self) -> AccountSigner:
        """Mints agents."""
        return AccountSigner(seed=self.agents, account_public=self.account_public)


def load_or_create_keys(directory: Path, entropy: Entropy = os.urandom) -> Keys:
    """Return the keys kept in a folder, making those that are missing.

    Refused with DataDirectoryRefused when a key file can be read by others: it may already be known to them.
    """
    private_directory(directory)

    def key(name: str, kind: int) -> str:
        path = directory / f"{name}.nk"
        if not path.exists():
            write_private(path, new_seed(kind, entropy) + "\n")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise DataDirectoryRefused(
                f"{path} is open to other users: `chmod 600` it if nobody read it, else remove it and restart "
                "(every credential signed with it ends)"
            )
        return path.read_text(encoding="ascii").strip()

    return Keys(
        operator=key("operator", OPERATOR),
        account=key("account", ACCOUNT),
        system=key("system", ACCOUNT),
        agents=key("agents", ACCOUNT),
    )
