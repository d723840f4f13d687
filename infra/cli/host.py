"""`fleetlog host`: makes, checks and removes the network that machines of this host use."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import click
import msgspec

from infra.cli.command import LateGroup, with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.session import Session
from infra.config.backends import WITH_SCRIPTED
from infra.config.firecracker import FirecrackerScaler
from infra.config.load import load
from infra.config.microvm_network import MicrovmNetwork, MicrovmNetworkForm, read_network
from infra.network.host import HostNetwork

P = ParamSpec("P")
_OPTIONS = (
    click.option("--config", type=click.Path(path_type=Path), help="The fleet file with `microvm_network`."),
    click.option("--config-dir", type=click.Path(path_type=Path), help="A directory of drop-in files."),
    click.option("--cidr", help="The network, in place of the file's."),
    click.option("--bridge", help="The bridge, in place of the file's."),
    click.option("--gateway", help="The host's address in it, in place of the file's."),
    click.option("--nft-table", help="The nft table, in place of the file's."),
    click.option("--egress-interface", help="The way out, in place of the default route's."),
    click.option("--sudo", is_flag=True, help="Use the host's programs through `sudo -n`."),
    click.option(
        "--etc",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("/etc"),
        show_default=True,
        help="Where the host's settings are.",
    ),
)


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The options all of these commands share."""

    config: Path | None
    config_dir: Path | None
    cidr: str | None
    bridge: str | None
    gateway: str | None
    nft_table: str | None
    egress_interface: str | None
    sudo: bool
    etc: Path


@click.group(cls=LateGroup)
def host() -> None:
    """Make, check and remove the network that machines of this host use."""


def with_network(
    function: Callable[Concatenate[Session, HostNetwork, P], int],
) -> Callable[Concatenate[Session, P], int]:
    """Give the command the network that file and options name."""

    @wraps(function)
    def run(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> int:
        options: dict[str, Any] = {name: kwargs.pop(name) for name in Given.__struct_fields__}
        given = Given(**options)
        with HostNetwork(
            settings(given), sudo=given.sudo or _file_says_sudo(given), etc=given.etc.absolute()
        ) as network:
            return function(session, network, *args, **kwargs)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def _file_says_sudo(given: Given) -> bool:
    """Tell whether a scaler of the file that uses this network does so through sudo."""
    if given.config is None:
        return False
    scalers = load(given.config, given.config_dir, WITH_SCRIPTED).scalers
    return any(isinstance(scaler, FirecrackerScaler) and scaler.use_sudo for scaler in scalers)


def settings(given: Given) -> MicrovmNetwork:
    """Return the file's network with the options in place of its own.

    Raises:
        ConfigError: the file is refused.
        CliError: the options do not fit together.
    """
    if given.config_dir is not None and given.config is None:
        raise CliError(ExitCode.USAGE, "usage", "--config-dir without --config: give both")
    from_file = (
        MicrovmNetwork()
        if given.config is None
        else load(given.config, given.config_dir, WITH_SCRIPTED).microvm_network
    )
    names = ("cidr", "bridge", "gateway", "nft_table", "egress_interface")
    options = {name: value for name in names if (value := getattr(given, name)) is not None}
    form = msgspec.to_builtins(from_file)
    if "cidr" in options:
        form.pop("gateway")
    try:
        return read_network(msgspec.convert(form | options, MicrovmNetworkForm))
    except ValueError as error:
        raise CliError(ExitCode.USAGE, "usage", f"the network's options: {error}") from error


@host.command()
@click.option(
    "--persist", is_flag=True, help="Also bring it back at every boot: a script and a unit, enabled."
)
@with_session
@with_network
def provision(session: Session, network: HostNetwork, *, persist: bool) -> int:
    """Make what is missing: bridge, rules, forwarding. Repeatable at any time, machines running or not."""
    network.provision()
    network.probe_isolation()
    files = network.persist() if persist else []
    return _report(session, network, "ready", files)


@host.command()
@with_session
@with_network
def verify(session: Session, network: HostNetwork) -> int:
    """Check everything and change nothing; ends with 1 if something is not as it should be."""
    return _report(session, network, "ready", [])


@host.command()
@click.option("--persist", is_flag=True, help="Also remove the boot script and its unit.")
@click.option("--force", is_flag=True, help="Also with machines running: they lose their network.")
@with_session
@with_network
def teardown(session: Session, network: HostNetwork, *, persist: bool, force: bool) -> int:
    """Remove TAPs, bridge and rules of ours; what is not there is fine."""
    network.teardown(force=force)
    files = network.forget() if persist else []
    if session.out.as_json:
        session.out.document(
            {"bridge": network.config.bridge, "removed": True, "files": [str(each) for each in files]}
        )
        return ExitCode.OK
    session.out.line(f"{network.config.bridge} ({network.config.cidr}): removed")
    for file in files:
        session.out.line(f"removed {file}")
    return ExitCode.OK


def _report(session: Session, network: HostNetwork, word: str, files: list[Path]) -> int:
    verdict, config = network.verify(), network.config
    code = ExitCode.OK if verdict.healthy else ExitCode.FOUND
    if session.out.as_json:
        session.out.document(
            {
                "bridge": config.bridge,
                "cidr": config.cidr,
                "gateway": config.gateway,
                "nft_table": config.nft_table,
                "healthy": verdict.healthy,
                "misses": verdict.misses,
                "files": [str(each) for each in files],
            }
        )
        return code
    for miss in verdict.misses:
        session.out.line(miss, style="red")
    if verdict.healthy:
        session.out.line(f"{config.bridge} ({config.cidr}, nft table {config.nft_table}): {word}")
    else:
        session.out.note("`fleetlog host provision` puts this right")
    for file in files:
        session.out.line(f"wrote {file}")
    return code
