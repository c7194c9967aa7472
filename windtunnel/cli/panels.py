"""Help with the flags under headings, without rich."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


def flag(panel: str, *names: str, metavar: str | None = None, help: str, **more: Any) -> Any:  # noqa: A002 -- typer's word
    """An option under the heading ``panel``, whose default is told in its help, if at all."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, show_default=False, **more)


class PanelCommand(TyperCommand):
    """Lists options under their ``rich_help_panel``, in the order in which the headings first appear."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, a section for each heading."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(param, "rich_help_panel", None) or heading, []).append(record)
        for heading, records in panels.items():
            with formatter.section(heading):
                formatter.write_dl(records)
