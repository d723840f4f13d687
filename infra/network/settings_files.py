"""Files of ours among the host's settings: NetworkManager keeps off, and the network comes back with the next boot."""

import shlex
from pathlib import Path

from actors.errors import DriverError
from infra.network.parts import Parts
from infra.network.rules import Site, provision_script

_NETWORK_MANAGER = "NetworkManager"
_EGRESS = "FLEETLOG-EGRESS"
"""Stands for the way out until the boot script knows it; no interface has a name as long."""


def write_network_manager_file(parts: Parts) -> None:
    """Tell NetworkManager, if the host has it, that our interfaces are not its own."""
    if not (parts.etc / _NETWORK_MANAGER).is_dir():
        return
    globs = dict.fromkeys((parts.config.interface_glob, "flt-*"))
    text = "[keyfile]\nunmanaged-devices+=" + ";".join(f"interface-name:{glob}" for glob in globs) + "\n"
    _write(parts, parts.etc / _NETWORK_MANAGER / "conf.d" / f"fleetlog-{parts.config.bridge}.conf", text)


def persist(parts: Parts) -> list[Path]:
    """Write a boot script that needs nothing of ours, and a unit that runs it; enabled for the next boot, not started.

    Returns the files. Repeatable.

    Raises:
        DriverError: a file cannot be written.
    """
    script, unit, link = _paths(parts)
    _write(parts, script, boot_script(parts), mode=0o755)
    _write(parts, unit, _unit_text(parts, script))
    _link(parts, link, unit)
    return [script, unit, link]


def forget(parts: Parts) -> list[Path]:
    """Remove what `persist` wrote, and return what was there."""
    gone = []
    for path in reversed(_paths(parts)):
        if path.exists() or path.is_symlink():
            _remove(parts, path)
            gone.append(path)
    return gone


def boot_script(parts: Parts) -> str:
    """Return the script: rules, then bridge, then forwarding; a table that is there already is left as it is."""
    bridge, config = parts.bridge, parts.config
    site = Site(
        table=config.nft_table,
        bridge=config.bridge,
        subnet=config.cidr,
        gateway=config.gateway,
        egress=config.egress_interface or _EGRESS,
    )
    quote = shlex.quote
    name, table = quote(bridge.name), quote(config.nft_table)
    rules = provision_script(site, ())
    detect = f"EGRESS={quote(config.egress_interface)}" if config.egress_interface else _DETECT
    return f"""#!/bin/sh
# Written by `fleetlog host provision --persist`: brings the network of machines back at boot. Needs sh, ip, nft, sed.
set -eu
{detect}
if ! nft list table inet {table} >/dev/null 2>&1; then
  sed "s/{_EGRESS}/$EGRESS/g" <<'END_OF_RULES' | nft -f -
{rules}
END_OF_RULES
fi
if ! ip link show dev {name} >/dev/null 2>&1; then
  ip link add name {name} address {quote(bridge.mac)} type bridge
  ip link set dev {name} alias {quote(bridge.alias)}
fi
if [ -e {quote(f"/proc/sys/net/ipv6/conf/{bridge.name}/disable_ipv6")} ]; then
  echo 1 > {quote(f"/proc/sys/net/ipv6/conf/{bridge.name}/disable_ipv6")}
fi
ip addr replace {quote(f"{bridge.gateway}/{bridge.prefix_length}")} brd + dev {name}
ip link set dev {name} up
echo 1 > /proc/sys/net/ipv4/ip_forward
"""


_DETECT = """EGRESS=
TRIES=0
while :; do
  EGRESS=$(ip -4 route show default | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' | sed -n 1p)
  [ -z "$EGRESS" ] || break
  TRIES=$((TRIES + 1))
  [ "$TRIES" -lt 60 ] || { echo 'no default route: machines would have no way out' >&2; exit 1; }
  sleep 1
done"""


def _unit_text(parts: Parts, script: Path) -> str:
    return f"""[Unit]
Description=fleetlog: network of machines on bridge {parts.config.bridge}
Wants=network-online.target
After=network-online.target nftables.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart="{script}"

[Install]
WantedBy=multi-user.target
"""


def _paths(parts: Parts) -> tuple[Path, Path, Path]:
    name = f"fleetlog-network-{parts.config.bridge}"
    unit = parts.etc / "systemd" / "system" / f"{name}.service"
    return (
        parts.etc / "fleetlog" / f"{name}.sh",
        unit,
        unit.parent / "multi-user.target.wants" / unit.name,
    )


def _write(parts: Parts, path: Path, text: str, mode: int = 0o644) -> None:
    if parts.commands.sudo:
        parts.commands.run("install", "-D", "-m", f"{mode:o}", "/dev/stdin", str(path), stdin=text)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text, encoding="utf-8")
        fresh.chmod(mode)
        fresh.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _link(parts: Parts, link: Path, target: Path) -> None:
    # What `systemctl enable` does, where there is no systemctl to ask either.
    if parts.commands.sudo:
        parts.commands.run("mkdir", "-p", str(link.parent))
        parts.commands.run("ln", "-sfn", str(target), str(link))
        return
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    except OSError as error:
        raise _unwritable(link, error) from error


def _remove(parts: Parts, path: Path) -> None:
    if parts.commands.sudo:
        parts.commands.run("rm", "-f", str(path))
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DriverError:
    message = f"{path} cannot be written: {error.strerror}; run as root or with --sudo"
    return DriverError("refused", message, transient=False)
