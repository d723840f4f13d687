"""`fleetlog`: the root of the command line, its global options, and where each command lives."""

from importlib.metadata import version
from pathlib import Path

import click

from infra.cli.command import MainGroup, json_option
from infra.cli.exits import EPILOG
from infra.cli.kinds import NAME
from infra.cli.session import Settings, Source, default_data_directory

COMMANDS = {
    "up": ("infra.cli.up:up", "Run a coordinator."),
    "demo": ("infra.cli.demo:demo", "See it work on real parts, with a crash in the middle."),
    "demand": ("infra.cli.demand:demand", "Ask for agents."),
    "agent": ("infra.cli.agent:agent", "List, describe and end agents."),
    "scaler": ("infra.cli.scaler:scaler", "List, describe, pause, resume and drain scalers."),
    "events": ("infra.cli.events:events", "Show the log, and follow it."),
    "replay": ("infra.cli.replay:replay", "Show the fleet as it was."),
    "log": ("infra.cli.log:log", "Show, resize and archive the log."),
    "rebuild": ("infra.cli.tables:rebuild", "Make the tables again from the log."),
    "verify": ("infra.cli.tables:verify", "Compare tables and hosts with the log."),
    "host": ("infra.cli.host:host", "Make, check and remove the network of this host's machines."),
    "orphans": ("infra.cli.orphans:orphans", "List and end machines that nobody accounts for."),
    "reap": ("infra.cli.reap:reap", "Take away what dead machines left on a host."),
    "config": ("infra.cli.config:config", "Check a fleet file."),
    "doctor": ("infra.cli.doctor:doctor", "Say what is wrong and what to do."),
    "api": ("infra.cli.api:api", "Print the request API: subjects and JSON schema."),
    "contract": ("infra.cli.contract:contract", "Print the contract with provisioners."),
}
"""Name -> where it lives, imported when called, and its short help."""

_HELP = """Bring ephemeral CI agents up and take them down; the log is the truth.

Commands find a coordinator through its data directory (--data-dir), or go straight to NATS with --nats. Those that
only read need no coordinator: they fold the log, or read PostgreSQL, and say which. The options below can also be given
in the environment, as FLEETLOG_ and their name: FLEETLOG_DATA_DIR, FLEETLOG_NATS, FLEETLOG_POSTGRES.
"""

_file = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group(
    cls=MainGroup,
    late=COMMANDS,
    help=_HELP,
    epilog=EPILOG,
    context_settings={
        "auto_envvar_prefix": "FLEETLOG",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.option(
    "--data-dir",
    "--data",
    "data_dir",
    type=click.Path(path_type=Path),
    help="The coordinator's folder (else /var/lib/fleetlog as root, ~/.local/state/fleetlog otherwise).",
)
@click.option("--cluster", type=NAME, default="default", show_default=True, help="The cluster's name.")
@click.option("--nats", metavar="URL", help="NATS, nats://HOST:PORT or tls://HOST:PORT, several with commas.")
@click.option("--nats-creds", "--creds", "nats_creds", type=_file, help="A NATS creds file.")
@click.option("--tls-ca", type=_file, help="Certificates to trust for NATS instead of the system's (PEM).")
@click.option("--tls-cert", type=_file, help="Our certificate for NATS (PEM).")
@click.option("--tls-key", type=_file, help="Its key (PEM).")
@click.option("--postgres", metavar="DSN", help="PostgreSQL with the read models.")
@click.option(
    "--source",
    type=click.Choice(["auto", "log", "tables"]),
    default="auto",
    show_default=True,
    help="What commands that list read: the tables when there are any, else the log.",
)
@json_option
@click.version_option(version("fleetlog"), message="fleetlog %(version)s")
@click.pass_context
def main(
    ctx: click.Context,
    *,
    data_dir: Path | None,
    cluster: str,
    nats: str | None,
    nats_creds: Path | None,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    postgres: str | None,
    source: Source,
) -> None:
    """Keep the global options for the command; the help text is above."""
    if tls_key is not None and tls_cert is None:
        raise click.UsageError("--tls-key without --tls-cert: give both")
    ctx.ensure_object(dict)["settings"] = Settings(
        data_directory=(data_dir or default_data_directory()).expanduser().absolute(),
        cluster=cluster,
        nats=nats,
        nats_creds=nats_creds,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        postgres=postgres,
        source=source,
    )


if __name__ == "__main__":
    main()
