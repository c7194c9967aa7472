"""Help with the flags under headings, without rich."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


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
