"""The constant rules of a host network, as nft text. Nothing of a single machine is in here: that is in the sets.

Each rule carries a comment `fleetlog <chain> <number> <digest of its text>`: what is ours is told from what is not,
and what is in force is told from what should be. Order in `leaving` is the meaning: the gateway, then what a machine is
allowed, then what no machine may reach, then what one machine may not, and last the way out.
"""

import hashlib
import ipaddress
from collections.abc import Iterator, Sequence

import msgspec

from actors.decisions.addresses import TAP_PREFIX
from infra.network.policy import ALLOWED, BOUND, DENIED, HOST, HOST_PORTS, KNOWN, SETS

COMMENT_PREFIX = "fleetlog "
OWNER_SET, GUARD_SET = "bridge_name", "guarded"

_INTERNAL = "10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16"
_LINK_LOCAL = "169.254.0.0/16"
_NOT_INTERNET = "0.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 192.0.0.0/24, 198.18.0.0/15, 224.0.0.0/3"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules depend on. `egress` None: there is no way out of the host."""

    table: str
    bridge: str
    subnet: str
    gateway: str
    egress: str | None


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """One chain and its rules. `hook` makes it a base chain: others may put rules there, and we leave them."""

    family: str
    name: str
    rules: tuple[str, ...]
    hook: str = ""
    egress: str | None = None

    def comments(self) -> list[str]:
        """Return the comment of each rule, in order; the way out stands in it by name, and may be found out later."""
        return [
            f"{COMMENT_PREFIX}{self.name} {index:02d} {_digest(rule, self.egress)}"
            for index, rule in enumerate(self.rules)
        ]


def _digest(rule: str, egress: str | None) -> str:
    named = f'"{egress}"'
    way_out = f" {egress}" if egress is not None and named in rule else ""
    return hashlib.sha256(rule.replace(named, "out").encode()).hexdigest()[:12] + way_out


def chains(site: Site) -> tuple[Chain, ...]:
    """Return every chain, those that others jump to first."""
    bridge = f'"{site.bridge}"'
    ports = [f'iifname "{glob}"' for glob in tap_globs(site.subnet)]
    return (
        Chain(family="inet", name="baseline", rules=tuple(_baseline(site)), egress=site.egress),
        Chain(family="inet", name="leaving", rules=tuple(_leaving(site, bridge))),
        Chain(
            family="inet",
            name="returning",
            rules=("ct state established,related ct direction reply accept", "drop"),
        ),
        Chain(family="inet", name="arriving", rules=tuple(_arriving())),
        Chain(
            family="inet",
            name="forward",
            hook="type filter hook forward priority 0; policy accept;",
            rules=(
                f"iifname {bridge} jump leaving",
                f"oifname {bridge} jump returning",
                *(f"{glob} drop" for glob in ports),
            ),
        ),
        Chain(
            family="inet",
            name="input",
            hook="type filter hook input priority 0; policy accept;",
            rules=(
                f'tcp dport @{GUARD_SET} iifname != {{ "lo", {bridge} }} drop',
                f"iifname {bridge} jump arriving",
                *(f"{glob} drop" for glob in ports),
                f'ip saddr {site.subnet} iifname != "lo" drop',
            ),
        ),
        Chain(
            family="inet",
            name="clamp",
            hook="type filter hook forward priority -150; policy accept;",
            rules=tuple(
                f"{side} {bridge} tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu"
                for side in ("iifname", "oifname")
            ),
        ),
        Chain(
            family="inet",
            name="postrouting",
            hook="type nat hook postrouting priority 100; policy accept;",
            rules=(f"ip saddr {site.subnet} oifname != {bridge} masquerade",),
        ),
        Chain(family="bridge", name="port", rules=tuple(_port())),
        Chain(
            family="bridge",
            name="prerouting",
            hook="type filter hook prerouting priority -300; policy accept;",
            rules=tuple(f"{glob} jump port" for glob in ports),
        ),
    )


def tap_globs(subnet: str) -> list[str]:
    """Return name patterns that fit the TAPs of the subnet's addresses and of no other: TAPs are named by address."""
    network = ipaddress.IPv4Network(subnet)
    digits, bits = divmod(network.prefixlen, 4)
    first = network.network_address.packed.hex()
    if not bits:
        return [f"{TAP_PREFIX}{first[:digits]}*"]
    start = int(first[digits], 16)
    return [f"{TAP_PREFIX}{first[:digits]}{digit:x}*" for digit in range(start, start + (1 << (4 - bits)))]


def _leaving(site: Site, bridge: str) -> Iterator[str]:
    yield "meta nfproto != ipv4 drop"
    yield f"ip saddr != @{KNOWN.name} drop"
    # From machine to machine by way of the host: no allowlist opens that.
    yield f"oifname {bridge} drop"
    yield f"ip daddr {site.gateway} accept"
    yield f"ip saddr . ip daddr @{ALLOWED.name} accept"
    yield f"ip daddr {{ {_INTERNAL} }} drop"
    yield f"ip daddr {_LINK_LOCAL} drop"
    yield f"ip saddr @{DENIED.name} drop"
    yield "jump baseline"


def _baseline(site: Site) -> Iterator[str]:
    yield f"ip daddr {{ {_NOT_INTERNET} }} drop"
    if site.egress is not None:
        yield f'ip saddr {site.subnet} oifname "{site.egress}" accept'
    yield "drop"


def _arriving() -> Iterator[str]:
    yield "meta nfproto != ipv4 drop"
    # Answers to what the host began, and nothing else: a flow that a machine began is judged by each packet, so a
    # later machine with the address cannot go on with it.
    yield "ct state established,related ct direction reply accept"
    yield f"ip saddr != @{KNOWN.name} drop"
    yield f"ip saddr . ip daddr @{HOST.name} accept"
    yield f"ip saddr . ip daddr . meta l4proto . th dport @{HOST_PORTS.name} accept"
    yield "drop"


def _port() -> Iterator[str]:
    bound = f"@{BOUND.name}"
    yield (
        f"ether type arp arp htype 1 arp ptype ip iifname . ether saddr . arp saddr ip {bound} "
        f"iifname . arp saddr ether . arp saddr ip {bound} accept"
    )
    yield f"ether type ip iifname . ether saddr . ip saddr {bound} accept"
    yield "counter drop"


def provision_script(site: Site, replaced: Sequence[tuple[str, str, int]]) -> str:
    """Return the transaction that puts the rules in force.

    No table is deleted, no set emptied. In base chains only the rules with the handles in `replaced` as (family, chain,
    handle), which are ours of before, are replaced; other rules stay where they are, behind ours.
    """
    lines = [f"add table {family} {site.table}" for family in ("inet", "bridge")]
    for each in SETS:
        flags = " flags interval;" if each.ranges else ""
        lines.append(f"add set {each.family} {site.table} {each.name} {{ type {each.type};{flags} }}")
    lines += [
        f"add set inet {site.table} {GUARD_SET} {{ type inet_service; }}",
        f"add set inet {site.table} {OWNER_SET} {{ type ifname; }}",
        f'add element inet {site.table} {OWNER_SET} {{ "{site.bridge}" }}',
    ]
    wanted = chains(site)
    for chain in wanted:
        hook = f" {{ {chain.hook} }}" if chain.hook else ""
        lines.append(f"add chain {chain.family} {site.table} {chain.name}{hook}")
        if not chain.hook:
            lines.append(f"flush chain {chain.family} {site.table} {chain.name}")
    lines += [
        f"delete rule {family} {site.table} {chain} handle {handle}" for family, chain, handle in replaced
    ]
    for chain in wanted:
        place = f"{chain.family} {site.table} {chain.name}"
        rules = [f'{rule} comment "{note}"' for rule, note in zip(chain.rules, chain.comments(), strict=True)]
        if chain.hook:
            # Inserted from the last to the first: ours stand first, in their order.
            lines += [f"insert rule {place} {rule}" for rule in reversed(rules)]
        else:
            lines += [f"add rule {place} {rule}" for rule in rules]
    return "\n".join(lines)
