"""`fleetlog up`: run a coordinator until it is told to stop."""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import click

from infra.app import Coordinator, Options
from infra.cli.command import json_option
from infra.cli.exits import CliError, ExitCode
from infra.cli.failures import expected
from infra.cli.kinds import LENGTH, NAME, SIZE
from infra.cli.session import Settings
from infra.config.backends import BACKENDS, WITH_SCRIPTED
from infra.config.fleet import FleetConfig
from infra.config.load import check
from infra.config.problems import ConfigError
from infra.embedded.errors import ServerFailed
from infra.embedded.nats_server import Durability
from infra.host import DiskFull
from infra.http.address import AddressRefused
from infra.journal.address import NatsAddress
from infra.line_forwarder import Origin, forwarded
from infra.servers import ServerOptions

logger = logging.getLogger("fleetlog")

STARTUP_BACKOFF_S = 30.0
"""A start that must fail waits this long under a service manager, so that restarts do not spin [5.6]."""

_HELP = """Run a coordinator: NATS and PostgreSQL of its own unless told of others, the actors, and the front doors.

Without --config it runs no scaler; demand is answered with no-backend. Ctrl-C or SIGTERM ends it in order: machines
run on and are taken up again at the next start. A second Ctrl-C ends it at once, which loses nothing either.
"""

_file = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(help=_HELP)
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="The fleet file (YAML).")
@click.option(
    "--config-dir",
    type=click.Path(path_type=Path),
    help="A folder of drop-in files with more scalers (scalers.d).",
)
@click.option(
    "--id", "coordinator", type=NAME, help="This coordinator's name, stable over restarts (else the host's)."
)
@click.option("--host", type=NAME, help="This host's name in the log (else the kernel's).")
@click.option(
    "--http", default="127.0.0.1:0", show_default=True, help="Where /health and /metrics are served."
)
@click.option(
    "--nats-port", type=click.IntRange(0, 65535), help="The embedded NATS's port (else a free one, kept)."
)
@click.option(
    "--durability",
    default="always",
    show_default=True,
    help="When the embedded NATS syncs what it acknowledged: always, or a time such as 100ms, 1s, 2m.",
)
@click.option(
    "--log-limit", type=SIZE, help="The log's size when it is made, such as 8g (later: fleetlog log resize)."
)
@click.option(
    "--agent-signing-key",
    type=_file,
    help="With --nats: the seed of an account signing key, by which agents' credentials are minted.",
)
@click.option(
    "--agent-credential-ttl",
    type=LENGTH,
    default="1h",
    show_default=True,
    help="How long an agent's credential lives.",
)
@click.option(
    "--sweep-every",
    type=LENGTH,
    default="15m",
    show_default=True,
    help="How often the host is swept of what dead machines left.",
)
@click.option("--agent-lines", is_flag=True, help="Print what agents write to stdout, as JSON lines.")
@click.option(
    "--scripted", is_flag=True, hidden=True, help="Allow the scripted backend, which only pretends."
)
@click.option("-v", "--verbose", is_flag=True, help="Say more on stderr.")
@json_option
@click.pass_context
def up(
    ctx: click.Context,
    *,
    config_path: Path | None,
    config_dir: Path | None,
    coordinator: str | None,
    host: str | None,
    http: str,
    nats_port: int | None,
    durability: str,
    log_limit: int | None,
    agent_signing_key: Path | None,
    agent_credential_ttl: float,
    sweep_every: float,
    agent_lines: bool,
    scripted: bool,
    verbose: bool,
) -> int:
    """Run until stopped; the help text is above."""
    settings: Settings = ctx.obj["settings"]
    _log_to_stderr(verbose=verbose)
    try:
        options = Options(
            data_directory=settings.data_directory,
            config=_config(config_path, config_dir, scripted=scripted),
            servers=_servers(settings, agent_signing_key, nats_port, durability),
            cluster=settings.cluster,
            coordinator=coordinator,
            host=host,
            http=http,
            log_limit_bytes=log_limit,
            agent_credential_s=agent_credential_ttl,
            sweep_every_s=sweep_every,
            agent_lines=_print_line if agent_lines else None,
        )
        return _run(Coordinator(options))
    except Exception as error:
        _wait_under_a_service_manager(error)
        raise


def _config(path: Path | None, directory: Path | None, *, scripted: bool) -> FleetConfig:
    if path is None:
        if directory is not None:
            raise click.UsageError(
                "--config-dir without --config: drop-in files extend a fleet file; give both"
            )
        logger.warning("no --config: this coordinator runs no scaler")
        return FleetConfig(version=1)
    report = check(path, directory, WITH_SCRIPTED if scripted else BACKENDS)
    for warning in report.warnings:
        logger.warning("%s", warning)
    if report.config is None:
        raise ConfigError(report.problems)
    return report.config


def _servers(
    settings: Settings, signing_key: Path | None, nats_port: int | None, durability: str
) -> ServerOptions:
    if settings.nats is None:
        for given, option in ((signing_key, "--agent-signing-key"), (settings.nats_creds, "--nats-creds")):
            if given is not None:
                raise click.UsageError(f"{option} without --nats: the embedded NATS has its own keys")
    try:
        address = None
        if settings.nats is not None:
            address = NatsAddress(
                url=settings.nats,
                creds=settings.nats_creds,
                ca=settings.tls_ca,
                certificate=settings.tls_cert,
                key=settings.tls_key,
            )
        return ServerOptions(
            nats=address,
            agent_signing_key=signing_key,
            postgres=settings.postgres,
            nats_port=nats_port,
            durability=Durability(durability),
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _run(coordinator: Coordinator) -> int:
    _end_on_signals(coordinator.ending)
    try:
        coordinator.start()
    except (ServerFailed, DiskFull, AddressRefused) as error:
        raise CliError(ExitCode.UNREACHABLE, type(error).__name__, str(error)) from error
    try:
        coordinator.ending.wait()
        logger.info("ending: machines run on and are taken up at the next start")
    finally:
        coordinator.stop()
    if coordinator.fatal_reason is not None:
        raise CliError(ExitCode.REFUSED, "fatal", coordinator.fatal_reason)
    return int(ExitCode.OK)


def _end_on_signals(ending: threading.Event) -> None:
    def end(number: int, _frame: FrameType | None) -> None:
        if ending.is_set():
            os._exit(128 + number)  # asked twice: nothing is lost by not waiting, the log has it
        ending.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def _log_to_stderr(*, verbose: bool) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    for chatty in ("nats", "asyncio", "psycopg.pool", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _print_line(vm: str, line: str) -> None:
    sys.stdout.write(forwarded(line, Origin(service="fleetlog", agent=vm)) + "\n")
    sys.stdout.flush()


def _wait_under_a_service_manager(error: Exception) -> None:
    """Keep a service manager from starting us over and over on what only a person can mend."""
    if "INVOCATION_ID" not in os.environ or expected(error) is None:
        return
    logger.critical("%s", error)
    logger.info("waiting %g s before giving up, so that restarts do not spin", STARTUP_BACKOFF_S)
    time.sleep(STARTUP_BACKOFF_S)
