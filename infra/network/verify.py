"""Compares the host with how it should be: reads only, finds all that is missing, and never raises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from infra.network.installed import Installed, members, owner_of, read_installed
from infra.network.namespace import entered
from infra.network.parts import Parts, taps_of
from infra.network.policy import SETS
from infra.network.rules import GUARD_SET, Chain, Site, chains

_SHOWN_MOST = 10


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is not as it should be; empty: all is well."""

    misses: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether machines may be started."""
        return not self.misses

    @property
    def detail(self) -> str:
        """All of it in one line."""
        return "; ".join(self.misses) or "all is as it should be"


def verify(parts: Parts, guarded: frozenset[int] = frozenset()) -> Verdict:
    """Look at everything."""
    misses: list[str] = []
    looks: tuple[tuple[str, Callable[[], Iterator[str]]], ...] = (
        ("bridge", lambda: _bridge(parts)),
        ("forwarding", lambda: _forwarding(parts)),
        ("rules", lambda: _rules(parts)),
        ("guarded ports", lambda: _guarded(parts, guarded)),
        ("TAPs", lambda: _taps(parts)),
    )
    for what, look in looks:
        try:
            misses.extend(look())
        except Exception as error:  # noqa: BLE001 - a look that fails is a miss like any other
            misses.append(f"{what} cannot be looked at: {error}")
    return Verdict(misses=tuple(misses))


def _bridge(parts: Parts) -> Iterator[str]:
    wanted = parts.bridge
    found = parts.links.bridge(wanted.name)
    if found is None:
        yield f"bridge {wanted.name} is not there"
        return
    if found.kind != "bridge" or found.alias != wanted.alias:
        yield f"interface {wanted.name} is not ours (alias {found.alias!r}, not {wanted.alias!r})"
    if not found.up:
        yield f"bridge {wanted.name} is down"
    if f"{wanted.gateway}/{wanted.prefix_length}" not in found.addresses:
        there = ", ".join(found.addresses) or "none"
        yield f"bridge {wanted.name} has not the address {wanted.gateway}/{wanted.prefix_length} (has {there})"
    if found.mac != wanted.mac:
        yield f"bridge {wanted.name} has MAC {found.mac}, not {wanted.mac}"
    with entered(parts.commands.namespace):
        switch = Path(f"/proc/sys/net/ipv6/conf/{wanted.name}/disable_ipv6")
        if switch.exists() and switch.read_text(encoding="ascii").strip() != "1":
            yield f"bridge {wanted.name} has IPv6"


def _forwarding(parts: Parts) -> Iterator[str]:
    with entered(parts.commands.namespace):
        forwards = Path("/proc/sys/net/ipv4/ip_forward").read_text(encoding="ascii").strip()
    if forwards != "1":
        yield "the host does not forward (net.ipv4.ip_forward is 0)"


def _rules(parts: Parts) -> Iterator[str]:
    table = parts.config.nft_table
    found = read_installed(parts.nft, table)
    if not found.tables:
        yield f"nft table {table} is not there"
        return
    serves = owner_of(parts.nft, table)
    if serves is not None and serves != parts.config.bridge:
        yield f"nft table {table} serves bridge {serves}, not {parts.config.bridge}: this one has no NAT and no rules"
        return
    for each in SETS:
        if (each.family, each.name) not in found.sets:
            yield f"set {each.family} {table} {each.name} is not there"
    site = parts.site()
    if site.egress is None:
        yield "the host has no default route"
    for chain in chains(site):
        yield from _chain(site, chain, found)


def _chain(site: Site, chain: Chain, found: Installed) -> Iterator[str]:
    name = f"chain {chain.family} {site.table} {chain.name}"
    rules = found.chains.get((chain.family, chain.name))
    if rules is None:
        yield f"{name} is not there"
        return
    if found.hooks.get((chain.family, chain.name), "") != chain.hook:
        yield f"{name} is not attached as it should be ({chain.hook or 'no hook'})"
    wanted = chain.comments()
    there = [rule.comment for rule in rules]
    # What others put behind ours in a base chain is theirs; before ours it could let everything through.
    if (there[: len(wanted)] if chain.hook else there) == wanted and sum(rule.ours for rule in rules) == len(
        wanted
    ):
        return
    missing = [index for index, comment in enumerate(wanted) if comment not in there]
    if missing:
        for index in missing:
            yield f"{name} lacks its rule {index}: {chain.rules[index]}"
    elif len({comment for comment in there if comment in wanted}) < sum(rule.ours for rule in rules):
        yield f"{name} has a rule of ours twice"
    else:
        yield f"{name} has rules of others before or among ours"


def _guarded(parts: Parts, guarded: frozenset[int]) -> Iterator[str]:
    if not guarded:
        return
    there = members(parts.nft, parts.config.nft_table, GUARD_SET) or ()
    for port in sorted(guarded.difference(there)):
        yield f"port {port} is not guarded"


def _taps(parts: Parts) -> Iterator[str]:
    wrong = []
    for tap in taps_of(parts):
        if tap.bridge != parts.config.bridge:
            wrong.append(f"TAP {tap.name} is on {tap.bridge or 'no bridge'}, not {parts.config.bridge}")
        elif not tap.isolated:
            wrong.append(f"TAP {tap.name} is not isolated")
        elif tap.learning or tap.flooding:
            wrong.append(f"TAP {tap.name} may teach the bridge, or hear what is not for it")
    yield from wrong[:_SHOWN_MOST]
    if len(wrong) > _SHOWN_MOST:
        yield f"and {len(wrong) - _SHOWN_MOST} more TAPs like that"
