"""A command group that imports a command only when it is called."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from windtunnel.cli.panels import PanelCommand


class Command(NamedTuple):
    """Where a command lives (a function, or a Typer of several) and its line in the list of commands."""

    module: str
    function: str
    summary: str


class LazyGroup(TyperGroup):
    """Lists commands from a table, so that ``--help`` and ``--version`` import none of them."""

    commands_by_name: dict[str, Command] = {}  # noqa: RUF012 -- set once by `lazy_group`

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the table."""
        del ctx
        return list(self.commands_by_name)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported now; None if the table does not have it."""
        del ctx
        entry = self.commands_by_name.get(cmd_name)
        return None if entry is None else _import_command(cmd_name, entry)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name; an unknown one is refused with the nearest."""
        if args and args[0] not in self.commands_by_name:
            begins_alike = [name for name in self.commands_by_name if args[0] and name.startswith(args[0])]
            near = begins_alike or get_close_matches(args[0], self.commands_by_name, n=1)
            ctx.fail(f"no command {args[0]!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands from the table alone."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.commands_by_name.items()])


def lazy_group(commands: dict[str, Command]) -> type[LazyGroup]:
    """A LazyGroup class over this table."""
    return type("Commands", (LazyGroup,), {"commands_by_name": commands})


def _import_command(name: str, entry: Command) -> Any:
    function = getattr(import_module(entry.module), entry.function)
    if isinstance(function, typer.Typer):  # a command with commands of its own
        return typer.main.get_command(function)
    holder = typer.Typer(add_completion=False, rich_markup_mode=None)
    holder.command(name, cls=PanelCommand)(function)
    return typer.main.get_command(holder)
