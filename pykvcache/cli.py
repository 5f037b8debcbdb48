# SPDX-License-Identifier: Apache-2.0
"""The ``pykvcache`` command. Serving never imports it.

Exit codes: 0 done, 1 refused, not found or not wholly done (the message says why), 2 wrong usage.
"""

from __future__ import annotations

import sys

import typer

from pykvcache.commands import calibrate, content, doctor, trace, transport, upkeep, verify
from pykvcache.errors import ConfigError

app = typer.Typer(
    help="Tools for the KV cache on disk of vLLM's pykvcache backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(trace.app, name="trace")
for command in (
    doctor.doctor,
    content.ls,
    content.stats,
    content.lookup,
    verify.verify,
    upkeep.gc,
    upkeep.clear,
    upkeep.pin,
    upkeep.unpin,
    transport.export,
):
    app.command()(command)
app.command("import")(transport.import_)
app.command(context_settings=calibrate.CONTEXT)(calibrate.calibrate)


@app.callback()
def _options() -> None:
    """No options before the command."""


def main() -> None:
    """Run the command; an expected error is one line."""
    try:
        app()
    except ConfigError as error:
        sys.exit(f"pykvcache: {error}")


if __name__ == "__main__":
    main()
