"""What all commands share: `--json` at any place, the session, errors as one sentence, exit codes, late imports."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

from infra.cli.exits import ExitCode
from infra.cli.out import Output, print_error
from infra.cli.session import Session

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
_SIGPIPE_EXIT = 141


class LateGroup(click.Group):
    """A group whose commands are imported when they are called: `late` is name -> (module:attribute, short help)."""

    def __init__(self, *args: Any, late: dict[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.late = late or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every name, in the order they were declared."""
        del ctx
        return [*self.late, *(name for name in self.commands if name not in self.late)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in self.late:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.late[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        if not self.late:
            super().format_commands(ctx, formatter)
            return
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.late.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is answered with those there are."""
        name = args[0] if args else ""
        if name and name not in self.list_commands(ctx) and not name.startswith("-"):
            there = ", ".join(self.list_commands(ctx))
            ctx.fail(f"no such command {name!r}; there are: {there}")
        return super().resolve_command(ctx, args)


class MainGroup(LateGroup):
    """The root: ends every command with its exit code and one sentence; a trace is only ever a bug of ours."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - click's signature
        windows_expand_args: bool = True,  # noqa: FBT001, FBT002
        **extra: Any,
    ) -> Any:
        """Run, and exit."""
        _find_system_programs()
        given = list(sys.argv[1:] if args is None else args)
        as_json = _wants_json(given)
        try:
            result = super().main(
                given,
                prog_name or "fleetlog",
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            code = result if isinstance(result, int) else 0
            sys.stdout.flush()
        except click.exceptions.Exit as stop:
            code = stop.exit_code
        except click.ClickException as error:
            code = _usage(error, as_json=as_json)
        except (KeyboardInterrupt, click.Abort):
            print_error("interrupted", "interrupted", as_json=as_json)
            code = int(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            # Whoever read us has had enough; Python would complain again when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = _SIGPIPE_EXIT
        except Exception as error:  # noqa: BLE001 - the last place where anything can be said
            code = _failed(error, as_json=as_json)
        if standalone_mode:
            sys.exit(code)
        return code


def _find_system_programs() -> None:
    """Look for programs in the system's folders as well: Debian leaves them out of the PATH of plain users."""
    known = os.environ.get("PATH", os.defpath).split(os.pathsep)
    more = [folder for folder in ("/usr/sbin", "/sbin") if folder not in known]
    os.environ["PATH"] = os.pathsep.join([*known, *more])


def _wants_json(args: Sequence[str]) -> bool:
    """Tell whether errors are to be JSON, also of a command line that could not be parsed."""
    before = args[: args.index("--")] if "--" in args else args
    return "--json" in before or os.environ.get("FLEETLOG_JSON", "").lower() in {"1", "true", "yes", "on"}


def _usage(error: click.ClickException, *, as_json: bool) -> int:
    if as_json:
        print_error("usage", error.format_message(), as_json=True)
    else:
        error.show()
    return error.exit_code


def _failed(error: Exception, *, as_json: bool) -> int:
    from infra.cli.failures import expected  # noqa: PLC0415 - imports half of fleetlog, and only failures need it

    known = expected(error)
    if known is None:
        traceback.print_exc()
        print_error("bug", f"this is a bug in fleetlog: {type(error).__name__}: {error}", as_json=as_json)
        return 1
    print_error(known.kind, str(known), as_json=as_json)
    return int(known.exit_code)


def _set_json(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's
    if value:
        ctx.ensure_object(dict)["json"] = True


def json_option(function: F) -> F:
    """Let `--json` stand behind the command as well as before it."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_json,
        help="JSON for programs, on stdout.",
    )(function)


def with_session(function: Callable[Concatenate[Session, P], R]) -> Callable[P, R]:
    """Give the command a session of its own, closed when it ends; its return value is the exit code."""

    @json_option
    @click.pass_context
    @wraps(function)
    def run(ctx: click.Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given = ctx.ensure_object(dict)
        session = Session(given["settings"], Output(as_json=given.get("json", False)))
        ctx.call_on_close(session.close)
        return function(session, *args, **kwargs)

    return run
