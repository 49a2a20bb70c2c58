"""The fate of every option, as a table on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_cli.convert.conversion import Conversion
from grpo_cli.convert.rows import Kind

_STYLES = {Kind.SAME: "green", Kind.DIFFERENT: "yellow", Kind.NOT_NEEDED: "dim", Kind.LEFT: "bold red"}


def report(conversion: Conversion) -> None:
    """Print the findings by kind."""
    console = Console(stderr=True, highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(max_width=max(30, console.width // 2), overflow="fold")
    table.add_column(overflow="fold")
    for kind in Kind:
        if found := [finding for finding in conversion.findings if finding.kind is kind]:
            table.add_row(Text(f"{kind.value} ({len(found)})", style=_STYLES[kind]))
            for finding in found:
                how = f"-> {finding.to}" + (": " if finding.note else "") if finding.to else ""
                table.add_row(Text(f"  {finding.name}: {finding.value}"), Text(how + finding.note))
    console.print(table)
