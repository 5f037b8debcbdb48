# SPDX-License-Identifier: Apache-2.0
"""``pykvcache doctor``: would a server work here, and as well as it could?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pykvcache.commands.roots import JsonOption, RootOption, print_json
from pykvcache.config import parse_config
from pykvcache.doctor.findings import Finding, Verdict
from pykvcache.doctor.machine import check_machine
from pykvcache.doctor.place import check_place
from pykvcache.doctor.software import check_software

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def doctor(root: RootOption = None, as_json: JsonOption = False) -> None:
    """Check kernel, io_uring, memory, filesystem, vLLM and GPU, and say what to do about each."""
    findings = findings_of(root)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        _show(findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


def findings_of(root: Path | None) -> list[Finding]:
    """All of them, in the order in which they are shown.

    Raises:
        ConfigError: an option is bad.
    """
    config = parse_config({"root": root} if root is not None else {})
    return [*check_software(), *check_machine(), *check_place(config)]


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="bold")
        mark = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        table.add_row(mark, finding.check, text)
    console = Console()
    console.print(table)
    counts = [
        (sum(finding.verdict is verdict for finding in findings), what)
        for verdict, what in ((Verdict.FAIL, "failed"), (Verdict.WARN, "could be better"))
    ]
    summary = ", ".join(f"{count} {what}" for count, what in counts if count)
    console.print(f"\n{summary or 'all is well'}")
