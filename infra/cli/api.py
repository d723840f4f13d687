"""`fleetlog api`: the request API as programs need it, subjects and JSON schema."""

import click

from events import subjects
from infra.api.messages import VERBS, json_schema
from infra.cli.command import with_session
from infra.cli.session import Session


@click.command()
@with_session
def api(session: Session) -> None:
    """Print the request API: with --json its JSON schema, else the subjects and what they are for."""
    cluster = session.cluster
    if session.out.as_json:
        body = json_schema()
        for verb, entry in body["verbs"].items():
            entry["subject"] = subjects.api_of(cluster, "COORDINATOR", verb)
        body["verbs"]["demand"]["subject_of_any"] = subjects.api(cluster, "demand")
        session.out.document(body)
        return
    click.echo('NATS requests; JSON both ways. Whatever goes wrong is {"error": {"code", "message"}}.\n')
    click.echo(f"  {subjects.api(cluster, 'demand')}\n      To whichever coordinator is free.")
    for verb, (request, _) in VERBS.items():
        subject = subjects.api_of(cluster, "COORDINATOR", verb)
        click.echo(f"  {subject}\n      {_summary(request)}")
    click.echo("\n`fleetlog api --json` prints the JSON schema of every request and answer.")


def _summary(request: type) -> str:
    text = (request.__doc__ or "").partition(": ")[2].split(".")[0].replace("\n    ", " ").replace("`", "")
    return f"{text[:1].upper()}{text[1:]}."
