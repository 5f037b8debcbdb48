# SPDX-License-Identifier: Apache-2.0
"""The drawn parts of the documentation say what the code says."""

from __future__ import annotations

import pytest

from scripts import docs


@pytest.mark.parametrize("section", docs.SECTIONS)
def test_section_is_current(section: str) -> None:
    path, lines = docs.SECTIONS[section]
    text = path.read_text()
    assert docs.rendered(text, section, lines()) == text, "run `python scripts/docs.py`"


def test_every_reason_of_failure_is_explained() -> None:
    from pykvcache.transfer.jobs import Failure

    text = (docs.ROOT / "docs" / "metrics.md").read_text()
    assert [reason for reason in Failure if f"`{reason}`" not in text] == []


def test_every_identity_field_is_explained() -> None:
    from pykvcache.identity import Identity

    text = (docs.ROOT / "docs" / "architecture.md").read_text()
    fields = set(Identity.model_fields) - {"format_version"}
    explained = {name for name in fields if f"`{name}`" in text}
    assert {name for name in fields - explained if not name.endswith("parallel_size")} == set()
