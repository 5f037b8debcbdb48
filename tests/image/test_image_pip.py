# SPDX-License-Identifier: Apache-2.0
"""The image test's mounts: pip inside a build finds what it finds on this machine."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from scripts import image_pip


def test_files_that_pip_needs_are_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    certificates, wheels, index = (tmp_path / name for name in ("ca.crt", "wheels", "index"))
    certificates.write_text("certificate")
    wheels.mkdir()
    (index / "simple").mkdir(parents=True)
    configured = {
        "cert": str(certificates),
        "find-links": str(wheels),
        "extra-index-url": f"file://{index}/simple\nhttps://index.invalid/simple",
        "timeout": "180",
    }
    monkeypatch.setattr(image_pip, "settings", lambda: configured)
    made = tmp_path / "made"
    image_pip.main(made)

    mounted = {f"{made}:/etc/pip-of-host", f"{made}/pip.conf:/etc/pip.conf"}
    mounted |= {f"{wheels}:{wheels}", f"{index}:{index}"}
    assert set(capsys.readouterr().out.split()) == {f"--volume={mount}:ro" for mount in mounted}
    assert (made / "ca.crt").read_text() == "certificate"
    inside = configparser.ConfigParser()
    inside.read(made / "pip.conf")
    assert inside["global"]["cert"] == "/etc/pip-of-host/ca.crt"
    assert inside["global"]["extra-index-url"].split()[1] == "https://index.invalid/simple"
    assert inside["global"]["timeout"] == "180"


def test_settings_are_what_pip_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/where")
    assert image_pip.settings()["find-links"] == "/some/where"
