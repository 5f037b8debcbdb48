# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/conformance.py that decide what is compared, and what counts as the same."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import conformance
import pytest

JUNIT = """\
<testsuites><testsuite>
<testcase classname="tests.v1.test_a" name="test_passes[1-2]" file="tests/v1/test_a.py"/>
<testcase classname="tests.v1.test_a.TestClass" name="test_fails" file="tests/v1/test_a.py">
  <failure message="no"/></testcase>
<testcase classname="tests.v1.test_a" name="test_skips" file="tests/v1/test_a.py">
  <skipped message="no device"/></testcase>
<testcase classname="tests.v1.test_a" name="test_breaks" file="tests/v1/test_a.py">
  <error message="fixture"/></testcase>
<testcase classname="" name="tests.v1.test_b"><skipped message="whole module"/></testcase>
</testsuite></testsuites>
"""


def test_outcomes_are_keyed_by_what_pytest_accepts(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(JUNIT)
    assert conformance.read_outcomes(results) == {
        "tests/v1/test_a.py::test_passes[1-2]": "passed",
        "tests/v1/test_a.py::TestClass::test_fails": "failed",
        "tests/v1/test_a.py::test_skips": "skipped",
        "tests/v1/test_a.py::test_breaks": "error",
        "::tests.v1.test_b": "skipped",
    }


def test_same_failure_on_both_sides_is_no_difference() -> None:
    outcomes = {"a": "passed", "b": "failed"}
    assert conformance.differences(outcomes, dict(outcomes)) == set()


def test_every_kind_of_difference_counts() -> None:
    unpatched = {"a": "passed", "b": "failed", "c": "passed", "d": "passed"}
    patched = {"a": "failed", "b": "passed", "c": "skipped", "e": "passed"}
    assert conformance.differences(unpatched, patched) == {"a", "b", "c", "d", "e"}


def make_sdist(path: Path, names: list[str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            content = name.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_only_the_tests_are_unpacked(tmp_path: Path) -> None:
    prefix = f"vllm-{conformance.VLLM_VERSION}"
    archive = tmp_path / "sdist.tar.gz"
    make_sdist(archive, [f"{prefix}/vllm/__init__.py", f"{prefix}/tests/v1/test_a.py"])
    conformance.extract_tests(archive, tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files == [tmp_path / "run" / "tests" / "v1" / "test_a.py"]


def test_sdist_without_tests_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "sdist.tar.gz"
    make_sdist(archive, ["vllm-9/tests/test_a.py"])
    with pytest.raises(conformance.ConformanceError, match="has no vllm-"):
        conformance.extract_tests(archive, tmp_path / "run")


def test_another_sdist_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "sdist.tar.gz"
    make_sdist(archive, [f"vllm-{conformance.VLLM_VERSION}/tests/test_a.py"])
    with pytest.raises(conformance.ConformanceError, match="not the pinned source"):
        conformance.ensure_tests(tmp_path, archive)
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.parametrize(("overlay", "expected"), [(True, False), (False, True)])
def test_tree_of_the_wrong_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlay: bool, expected: bool
) -> None:
    """Comparing a tree with itself would always find no difference."""
    package = tmp_path / "vllm"
    (tmp_path / conformance.OVERLAY if overlay else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    info = tmp_path / "vllm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: vllm\nVersion: {conformance.VLLM_VERSION}+cpu\n")
    tree = conformance.Tree("some", (tmp_path,))
    conformance.check_tree(tree, has_overlay=overlay)
    with pytest.raises(conformance.ConformanceError, match="patched"):
        conformance.check_tree(tree, has_overlay=expected)
