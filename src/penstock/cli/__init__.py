"""The `penstock` command: one file a command, imported when it is called.

    $ penstock verify tokens/
    tokens/: 3 shards, 1,200 documents, 10,485,760 tokens: sound

A command parses its arguments, calls one function of the library and prints. What a user can mend
(any PenstockError) is one line on stderr and exit code 2. A command's module imports only click at
its top and the library inside the command: `penstock --help` reads the help of all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from penstock.errors import PenstockError

COMMANDS = {
    "demo": "penstock.cli.demo:demo",
    "index": "penstock.cli.index:index",
    "inspect": "penstock.cli.inspect:inspect",
    "plan": "penstock.cli.plan:plan",
    "prepare": "penstock.cli.prepare:prepare",
    "state": "penstock.cli.state:state",
    "verify": "penstock.cli.verify:verify",
}


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Every command's name, in order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of that name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(import_module(module), function)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what the user can mend becomes one line, Ctrl-C no line at all."""
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            _complain(ctx, str(error))
        except OSError as error:
            if error.filename is None or error.strerror is None:
                raise  # of a network or a pipe, not of a path that was given
            _complain(ctx, f"{error.filename}: {error.strerror}")
        except KeyboardInterrupt:
            ctx.exit(130)  # 128 + SIGINT, as a shell reports it


def _complain(ctx: click.Context, message: str) -> None:
    click.echo("Error: " + " ".join(message.splitlines()), err=True)
    ctx.exit(2)


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from penstock import __version__
    from penstock.order import ORDER_VERSION
    from penstock.store import FORMAT_VERSION

    click.echo(f"penstock {__version__} (store format {FORMAT_VERSION}, order {ORDER_VERSION})")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    epilog="Example: penstock verify tokens/",
    context_settings={"help_option_names": ["-h", "--help"]},  # for every command
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions of the package, of stores and of the order.",
)
def main() -> None:
    """Raw documents in, exact batches out: data for training language models."""
