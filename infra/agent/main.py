"""`fleetlog-agent -- COMMAND …`: the reference agent's command line."""

import asyncio
import logging
import os
import shutil
import sys
from pathlib import Path

import click

from infra.agent.bootstrap import Bootstrap, BootstrapError, ends_text, hide_secret, read_bootstrap
from infra.agent.job import NOT_FOUND
from infra.agent.life import Life, Patience

_HELP = """Run COMMAND as the one job of a fleetlog machine.

The agent says to its coordinator who it is, is told which labels and job it was started for, runs COMMAND, beats
while it runs, sends the lines it writes, reports its exit code, and exits with the same. COMMAND is any CI runner in
its one-job mode; it finds FLEETLOG_JOB, FLEETLOG_RUN, FLEETLOG_LABELS and FLEETLOG_GATE in its environment.

\b
On a machine that fleetlog started, everything it needs is in the environment:
  FLEETLOG_AGENT_ID          the machine's id
  FLEETLOG_CLUSTER           the cluster's name
  FLEETLOG_NATS_URL          nats://HOST:PORT, or tls://HOST:PORT (SSL_CERT_FILE names a CA of your own)
  FLEETLOG_AGENT_LABELS      labels, with commas between
  FLEETLOG_AGENT_CREDENTIAL  a NATS creds file's text, or a bearer token (hidden from COMMAND)

\b
Exit codes:
  COMMAND's own, or 128 + N if signal N ended it
    2  used wrongly, or not told enough to begin
    3  the coordinator, or NATS, refused this agent; the reason is on stderr
    4  nobody answered in time; COMMAND was not run
  126  COMMAND cannot be run        127  COMMAND was not found

\b
Examples:
  fleetlog-agent -- ./run.sh --once
  fleetlog-agent --dry-run -- ./run.sh --once
"""


@click.command(help=_HELP, context_settings={"max_content_width": 110})
@click.option("--nats", "nats_url", metavar="URL", help="Where NATS is (else FLEETLOG_NATS_URL).")
@click.option("--id", "agent_id", metavar="ID", help="The machine's id (else FLEETLOG_AGENT_ID).")
@click.option("--cluster", metavar="NAME", help="The cluster (else FLEETLOG_CLUSTER).")
@click.option(
    "--credential-file",
    type=click.Path(path_type=Path),
    help="A creds file of mode 0600 (else FLEETLOG_AGENT_CREDENTIAL).",
)
@click.option(
    "--register-timeout",
    "register_s",
    type=click.FloatRange(min=0.1),
    default=120.0,
    show_default=True,
    help="Seconds to get in before giving up with exit code 4.",
)
@click.option(
    "--done-timeout",
    "done_s",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="Seconds to try to report the end.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Seconds COMMAND has to end after a signal to the agent, which is passed on; then it is killed.",
)
@click.option(
    "--dry-run", is_flag=True, help="Say who would run what, and where it would connect; do nothing."
)
@click.option("--verbose", is_flag=True, help="Say more on stderr.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(
    *,
    nats_url: str | None,
    agent_id: str | None,
    cluster: str | None,
    credential_file: Path | None,
    register_s: float,
    done_s: float,
    grace_s: float,
    dry_run: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Run one command as the one job of a machine; the help text has it all."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.WARNING,
        format="fleetlog-agent: %(message)s",
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    if not command:
        raise click.UsageError("no COMMAND: write it after `--`, as in `fleetlog-agent -- ./run.sh --once`")
    try:
        bootstrap = read_bootstrap(
            os.environ,
            agent_id=agent_id,
            cluster=cluster,
            nats_url=nats_url,
            credential_file=credential_file,
        )
    except BootstrapError as error:
        raise click.UsageError(str(error)) from error
    hide_secret(os.environ)
    if shutil.which(command[0]) is None:
        # Before anybody counts on us: a machine that never registers is a failed start, which is what this is.
        click.echo(f"fleetlog-agent: command {command[0]!r} was not found or is not executable", err=True)
        sys.exit(NOT_FOUND)
    if dry_run:
        _explain(bootstrap, command)
        return
    patience = Patience(register_s=register_s, done_s=done_s, grace_s=grace_s)
    sys.exit(asyncio.run(_live(bootstrap, command, patience)))


async def _live(bootstrap: Bootstrap, command: tuple[str, ...], patience: Patience) -> int:
    return await Life(bootstrap, command, dict(os.environ), patience).run()


def _explain(bootstrap: Bootstrap, command: tuple[str, ...]) -> None:
    kind = "bearer token" if bootstrap.credential.seed is None else "creds"
    click.echo(
        f"agent       {bootstrap.id} of cluster {bootstrap.cluster}\n"
        f"labels      {', '.join(bootstrap.labels) or '(none)'}\n"
        f"connects to {bootstrap.nats_url}\n"
        f"credential  {kind} of {bootstrap.credential.public_key}, ends {ends_text(bootstrap.credential_ends_at)}\n"
        f"would run   {' '.join(command)}\n"
        "nothing was sent, nothing was run"
    )


if __name__ == "__main__":
    main()
