"""`fleetlog contract`: what fleetlog and provisioners promise each other, as documents."""

from pathlib import Path
from typing import Any, Literal

import click
import yaml

from infra.cli.command import with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.out import json_text
from infra.cli.session import Session
from infra.provision.contract import documents

_LINE_CHARACTERS = 110

Format = Literal["json", "yaml"]


@click.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "yaml"]),
    default="json",
    show_default=True,
    help="The AsyncAPI document's.",
)
@click.option(
    "--out",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the AsyncAPI document and the JSON schemas into this folder instead.",
)
@with_session
def contract(session: Session, *, form: Format, folder: Path | None) -> None:
    """Print the contract with provisioners: an AsyncAPI document of what they read, answer and may rely on."""
    if session.out.as_json and form != "json":
        raise click.UsageError("--json and --format yaml: give one of them")
    made = documents()
    if folder is None:
        click.echo(_text(made["asyncapi"], form))
        return
    written = [
        _write(folder / f"{name}.{form if name == 'asyncapi' else 'json'}", document)
        for name, document in made.items()
    ]
    if session.out.as_json:
        session.out.document({"written": [str(path) for path in written]})
        return
    for path in written:
        session.out.line(str(path))


def _write(path: Path, document: dict[str, Any]) -> Path:
    """Replace the file: it is made from the release, and nothing in it is anybody's own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(document, path.suffix.removeprefix(".")) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(
            ExitCode.FOUND, "not-written", f"{path}: {error.strerror}; choose another --out"
        ) from error
    return path


def _text(document: dict[str, Any], form: str) -> str:
    if form == "json":
        return json_text(document, indent=2)
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=_LINE_CHARACTERS).rstrip("\n")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are read: as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value again where it occurs again: anchors are nothing for a reader of documents."""
        del data
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
