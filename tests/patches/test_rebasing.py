# SPDX-License-Identifier: Apache-2.0
"""Series carried from one made-up upstream version to the next, with git as it is."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from distribution import upstream
from rebasing import burden, seams
from rebasing.pins import add_pin
from rebasing.workspace import ConflictError, RebaseError, Workspace, versions_of

REPOSITORY = Path(__file__).resolve().parents[2]
LINES = [f"line {number}" for number in range(1, 21)]
HEADER = """Let the scheduler ask

Description: It asks.
Origin: vendor
"""


def text_of(*changes: tuple[str, str]) -> str:
    """The upstream file with some lines in place of others."""
    replaced = dict(changes)
    return "".join(f"{replaced.get(line, line)}\n" for line in LINES)


class Checkout:
    """Patches, wheels and a workspace in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.patches = folder / "patches"
        self.patches.mkdir()
        self.place = Workspace(self.patches, folder / "work")

    def upstream(self, version: str, text: str) -> None:
        wheel = self.folder / f"vllm-{version}-cp38-abi3-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/core.py", text)
            archive.writestr("vllm/other.py", "x = 1\n")
            archive.writestr("vllm/_C.so", "not source")
        self.place.import_wheel(version, wheel)

    def series(self, version: str, *changes: tuple[str, str], base: str | None = None) -> None:
        """A series of one patch that changes lines."""
        self.place.git("checkout", "-q", "-B", f"series/{version}", f"pristine/{version}")
        (self.place.folder / "vllm" / "core.py").write_text(base or text_of(*changes))
        self.place.git("commit", "-qam", HEADER)
        self.place.export(version)

    def patch(self, version: str) -> str:
        (path,) = (self.patches / f"v{version}").glob("*.patch")
        return path.read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    made.upstream("1.0", text_of())
    made.series("1.0", ("line 10", "line 10, asked"))
    return made


def test_a_patch_is_called_after_its_subject_and_listed(checkout: Checkout) -> None:
    folder = checkout.patches / "v1.0"
    assert (folder / "series").read_text() == "let-the-scheduler-ask.patch\n"
    patch = checkout.patch("1.0")
    assert "+line 10, asked\n" in patch and "-line 10\n" in patch
    assert patch.startswith(f"From {'0' * 40} ")


def test_only_source_is_imported(checkout: Checkout) -> None:
    assert set(checkout.place.tree("pristine/1.0")) == {"vllm/core.py", "vllm/other.py"}


def test_an_unchanged_series_is_exported_byte_for_byte(checkout: Checkout) -> None:
    before = checkout.patch("1.0")
    checkout.place.apply_series("1.0")
    assert checkout.place.export("1.0") == []
    assert checkout.patch("1.0") == before


def test_a_renamed_patch_keeps_its_name_in_every_version(checkout: Checkout) -> None:
    folder = checkout.patches / "v1.0"
    (folder / "let-the-scheduler-ask.patch").rename(folder / "ask.patch")
    (folder / "series").write_text("ask.patch\n")
    checkout.upstream("1.1", "line 0\n" + text_of())
    checkout.place.rebase("1.0", "1.1")
    assert set(checkout.place.export("1.1")) == {"ask.patch", "series"}


def test_a_series_moves_to_where_its_lines_are_now(checkout: Checkout) -> None:
    checkout.upstream("1.1", "line 0\n" + text_of())
    checkout.place.rebase("1.0", "1.1")
    checkout.place.export("1.1")
    assert "@@ -8,7 +8,7 @@" in checkout.patch("1.1")
    assert checkout.place.tree("series/1.1")["vllm/core.py"].count("asked") == 1
    assert versions_of(checkout.patches) == ["1.0", "1.1"]


def test_a_conflict_is_shown_resolved_and_exported(checkout: Checkout) -> None:
    checkout.upstream("1.1", text_of(("line 10", "line ten")))
    with pytest.raises(ConflictError) as conflict:
        checkout.place.rebase("1.0", "1.1")
    message = str(conflict.value)
    assert "let-the-scheduler-ask.patch does not fit 1.1" in message
    assert "vllm/core.py" in message and "line ten" in message
    with pytest.raises(ConflictError, match=r"not resolved.*vllm/core\.py"):
        checkout.place.resume()
    with pytest.raises(RebaseError, match=r"a rebase to 1\.1 is going on"):
        checkout.place.apply_series("1.0")
    core = checkout.place.folder / "vllm" / "core.py"
    core.write_text(text_of(("line 10", "line ten, asked")))
    checkout.place.git("add", "vllm/core.py")
    assert checkout.place.resume() == "1.1"
    checkout.place.export("1.1")
    patch = checkout.patch("1.1")
    assert "-line ten\n" in patch and "+line ten, asked\n" in patch
    assert "Description: It asks." in patch


def test_a_rebase_can_be_given_up(checkout: Checkout) -> None:
    checkout.upstream("1.1", text_of(("line 10", "line ten")))
    with pytest.raises(ConflictError):
        checkout.place.rebase("1.0", "1.1")
    checkout.place.abort()
    assert checkout.place.rebasing is None
    checkout.place.apply_series("1.0")
    for go_on in (checkout.place.abort, checkout.place.resume):
        with pytest.raises(RebaseError, match="no rebase is going on"):
            go_on()


def test_what_upstream_has_taken_over_is_dropped(checkout: Checkout) -> None:
    checkout.upstream("1.1", text_of(("line 10", "line 10, asked")))
    checkout.place.rebase("1.0", "1.1")
    with pytest.raises(RebaseError, match="holds no patch"):
        checkout.place.export("1.1")


def test_a_patch_that_does_not_apply_is_named(checkout: Checkout) -> None:
    path = checkout.patches / "v1.0" / "let-the-scheduler-ask.patch"
    path.write_text(path.read_text().replace(" line 9\n", " line nine\n"))
    with pytest.raises(RebaseError, match=r"v1\.0/let-the-scheduler-ask\.patch does not apply"):
        checkout.place.apply_series("1.0")
    assert checkout.place.git("status", "--porcelain").stdout == ""


def test_burden_counts_lines_and_each_file_once(checkout: Checkout) -> None:
    patches, total = burden.of_series(checkout.patches / "v1.0")
    assert list(patches) == ["let-the-scheduler-ask.patch"]
    assert total.report() == {"files_touched": 1, "lines_added": 1, "lines_removed": 1}
    assert burden.together([total, total]).report() == {
        "files_touched": 1,
        "lines_added": 2,
        "lines_removed": 2,
    }


# --- seams

BASE = '''
class OffloadingManager:
    @abstractmethod
    def lookup(self, key, req_context): ...
    def touch(self, keys): ...
'''
OURS = '''
from vllm.v1.kv_offload.base import OffloadingManager

class PyKVCacheManager(OffloadingManager):
    def lookup(self, key, req_context): ...
'''


def seam_problems(tmp_path: Path, base: str, ours: str, **more: str) -> list[str]:
    overlay = tmp_path / "vllm"
    overlay.mkdir(exist_ok=True)
    (overlay / "manager.py").write_text(ours)
    tree = {"vllm/v1/kv_offload/base.py": base, **more}
    return [text for text in seams.problems(tree, overlay) if "manager" in text]


def test_an_overlay_that_fits_has_no_problem(tmp_path: Path) -> None:
    assert seam_problems(tmp_path, BASE, OURS) == []


Change = Callable[[str], str]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base: base.replace("OffloadingManager", "Manager"), "does not define"),
        (lambda base: base.replace("key, req", "key, group, req"), "lookup does not take group"),
        (lambda base: base.replace("touch", "pin").replace("    def pin", "    @abstractmethod\n"
                                   "    def pin"), "lacks pin"),  # fmt: skip
    ],
)
def test_what_upstream_changed_is_named(tmp_path: Path, change: Change, message: str) -> None:
    assert any(message in text for text in seam_problems(tmp_path, change(BASE), OURS))


def test_a_module_that_is_gone_is_named(tmp_path: Path) -> None:
    ours = OURS + "from vllm.gone import something\n"
    assert "vllm/manager.py: imports vllm.gone, which is not there" in seam_problems(
        tmp_path, BASE, ours
    )


def test_a_file_that_hides_upstreams_is_named(tmp_path: Path) -> None:
    found = seam_problems(tmp_path, BASE, OURS, **{"vllm/manager.py": ""})
    assert "vllm/manager.py hides upstream's file of the same name" in found


def test_an_attribute_that_is_gone_is_named() -> None:
    path = "vllm/v1/core/sched/request_queue.py"
    tree = {path: "class PriorityRequestQueue:\n    def __init__(self):\n        self._items = []\n"}
    found = seams.problems(tree, Path("none"))
    assert "PriorityRequestQueue has no attribute _heap any more" in found


def test_a_variable_that_upstream_calls_otherwise_is_named(checkout: Checkout) -> None:
    core = checkout.place.folder / "vllm" / "core.py"
    core.write_text("def start(sizes):\n    return len(groups)\n")
    (found,) = seams.undefined_names(checkout.place.folder, ["vllm/core.py"])
    assert "vllm/core.py:2" in found and "groups" in found


# --- pins


def test_a_new_version_is_pinned_before_the_others_of_its_target(tmp_path: Path) -> None:
    path = tmp_path / "upstream.toml"
    path.write_text((REPOSITORY / "upstream.toml").read_text())
    before = upstream.load(path)
    add_pin(path, "9.9.0", {"x86_64": "aa", "aarch64": "bb"})
    after = upstream.load(path)
    added, *rest = after.upstreams
    assert (added.target, added.project, added.version) == ("cuda", "vllm", "9.9.0")
    assert added.sha256 == {"x86_64": "aa", "aarch64": "bb"}
    assert replace(after, upstreams=tuple(rest)) == before


def test_pins_without_a_place_for_a_new_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "upstream.toml"
    path.write_text("[distribution]\n")
    with pytest.raises(RebaseError, match=r"upstream\.toml has no \[\[upstream\]\]"):
        add_pin(path, "9.9.0", {})


# --- the workflow


def test_the_workflow_runs_commands_that_exist() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "rebase.yml").read_text())
    steps = workflow["jobs"]["rebase"]["steps"]
    shell = "\n".join(step.get("run", "") for step in steps)
    (command,) = set(re.findall(r"scripts/patches\.py ([\w-]+)", shell))
    text = (REPOSITORY / "scripts" / "patches.py").read_text()
    assert f'@app.command("{command}")' in text
    assert workflow[True]["schedule"], "YAML 1.1 reads the key 'on' as true"
