"""Which of our rules a host has: read from nft's listing, told from other people's by their comments."""

from collections.abc import Iterator
from typing import Any

import msgspec

from infra.network.commands import CommandFailed
from infra.network.nft import Nft
from infra.network.rules import COMMENT_PREFIX, OWNER_SET

_GONE = "No such file or directory"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule; `comment` is empty for one that says nothing."""

    handle: int
    comment: str

    @property
    def ours(self) -> bool:
        """Whether we wrote it."""
        return self.comment.startswith(COMMENT_PREFIX)


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of a host network, by (family, chain or set). `hooks` has what base chains are attached to."""

    tables: frozenset[str] = frozenset()
    chains: dict[tuple[str, str], tuple[Rule, ...]] = {}
    hooks: dict[tuple[str, str], str] = {}
    sets: frozenset[tuple[str, str]] = frozenset()

    def ours(self) -> Iterator[tuple[str, str, int]]:
        """Yield (family, chain, handle) of every rule of ours."""
        for (family, chain), rules in self.chains.items():
            for rule in rules:
                if rule.ours:
                    yield family, chain, rule.handle


def read_installed(nft: Nft, table: str) -> Installed:
    """Return what there is of the table in both families.

    Raises:
        CommandFailed: nft cannot list it for another reason than that it is not there.
    """
    tables: set[str] = set()
    chains: dict[tuple[str, str], list[Rule]] = {}
    hooks: dict[tuple[str, str], str] = {}
    sets: set[tuple[str, str]] = set()
    for family in ("inet", "bridge"):
        try:
            listed = nft.listing("table", family, table)
        except CommandFailed as error:
            if _GONE in error.stderr:
                continue
            raise
        tables.add(family)
        for item in listed:
            if (chain := item.get("chain")) is not None:
                place = (family, chain["name"])
                chains.setdefault(place, [])
                hooks[place] = _hook(chain)
            elif (found := item.get("set")) is not None:
                sets.add((family, found["name"]))
            elif (rule := item.get("rule")) is not None:
                read = Rule(handle=rule["handle"], comment=rule.get("comment", ""))
                chains.setdefault((family, rule["chain"]), []).append(read)
    return Installed(
        tables=frozenset(tables),
        chains={place: tuple(rules) for place, rules in chains.items()},
        hooks=hooks,
        sets=frozenset(sets),
    )


def members(nft: Nft, table: str, name: str) -> list[Any] | None:
    """Return the elements of a plain set of the inet table, None if it is not there.

    Raises:
        CommandFailed: nft cannot list it for another reason.
    """
    try:
        listed = nft.listing("set", "inet", table, name)
    except CommandFailed as error:
        if _GONE in error.stderr:
            return None
        raise
    return [element for item in listed for element in item.get("set", {}).get("elem", ())]


def owner_of(nft: Nft, table: str) -> str | None:
    """Return the bridge that the table serves, None if there is no such table of a fleetlog."""
    found = members(nft, table, OWNER_SET)
    return str(found[0]) if found else None


def _hook(chain: dict[str, Any]) -> str:
    if "hook" not in chain:
        return ""
    return f"type {chain['type']} hook {chain['hook']} priority {chain['prio']}; policy {chain['policy']};"
