# SPDX-License-Identifier: Apache-2.0
"""The parts of the documentation that are drawn from the code: options, metrics, states.

`python scripts/docs.py` writes them between their markers; a test checks that they are
as the code says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from pykvcache.config import ENVIRONMENT_PREFIX, Config
from pykvcache.transfer.states import READ_TRANSITIONS, WRITE_TRANSITIONS
from vllm.v1.kv_offload.pykvcache.metrics import metric_definitions

ROOT = Path(__file__).resolve().parent.parent


def options() -> Iterator[str]:
    """A table of every option."""
    yield "| option | default | environment | what it does |"
    yield "| --- | --- | --- | --- |"
    for name, field in Config.model_fields.items():
        extra = field.json_schema_extra
        environment = isinstance(extra, dict) and extra.get("environment")
        default = field.default
        text = "`~/.cache/pykvcache`" if default is PydanticUndefined else f"`{default!r}`"
        variable = f"`{ENVIRONMENT_PREFIX}{name.upper()}`" if environment else ""
        choices = _choices(field.annotation)
        yield f"| `{name}` | {text} | {variable} | {choices}{field.description} |"


def _choices(annotation: type[Any] | UnionType | None) -> str:
    if get_origin(annotation) is not Literal:
        return ""
    return "/".join(f"`{choice}`" for choice in get_args(annotation)) + ". "


def metrics() -> Iterator[str]:
    """A table of the backend's own metrics."""
    yield "| metric | kind | labels | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, metadata in metric_definitions().items():
        counter = isinstance(metadata, OffloadingCounterMetadata)
        labels = ", ".join(f"`{label}`" for label in metadata.labelnames)
        shown = f"`{name}_total`" if counter else f"`{name}`"
        kind = "counter" if counter else "gauge"
        yield f"| {shown} | {kind} | {labels} | {metadata.documentation} |"


def states() -> Iterator[str]:
    """State diagrams of reads and writes."""
    for title, table in (("A read", READ_TRANSITIONS), ("A write", WRITE_TRANSITIONS)):
        yield f"{title}:"
        yield ""
        yield "```mermaid"
        yield "stateDiagram-v2"
        yield "    [*] --> waiting"
        for (state, event), following in table.items():
            target = "[*]" if following == "ended" else _identifier(following)
            yield f"    {_identifier(state)} --> {target}: {event}"
        yield "```"
        yield ""


def faults() -> Iterator[str]:
    """What becomes of each fault of the disk, as the suite plays it."""
    sys.path.insert(0, str(ROOT))
    from tests.core.fault_table import rows

    yield from rows()


def _identifier(state: str) -> str:
    return state.replace(" ", "_")


SECTIONS: dict[str, tuple[Path, Callable[[], Iterator[str]]]] = {
    "options": (ROOT / "README.md", options),
    "metrics": (ROOT / "docs" / "metrics.md", metrics),
    "states": (ROOT / "docs" / "architecture.md", states),
    "faults": (ROOT / "docs" / "faults.md", faults),
}


def rendered(text: str, section: str, lines: Iterator[str]) -> str:
    """The document with the section's text between its markers.

    Raises:
        ValueError: the document has no such markers.
    """
    body = "\n".join(lines).strip()
    pattern = re.compile(rf"(<!-- {section} -->\n).*?(<!-- /{section} -->)", re.DOTALL)
    result, count = pattern.subn(lambda match: f"{match[1]}{body}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"{count} sections '{section}' instead of one")
    return result


def main() -> None:
    """Write every section."""
    for section, (path, lines) in SECTIONS.items():
        path.write_text(rendered(path.read_text(), section, lines()))


if __name__ == "__main__":
    main()
