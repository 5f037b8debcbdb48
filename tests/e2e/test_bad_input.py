# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused before a server starts, in words a user can act on.

Most cases build vLLM's configuration in this process, as `vllm serve` does first of all; one runs
the real program.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.serving import ServingError
from tests.e2e.sites import Site


@pytest.fixture
def environment() -> Iterator[None]:
    """Put back what vLLM's configuration sets in this process's environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def configure(model: Path, options: Mapping[str, Any], **arguments: Any) -> Any:
    """What `vllm serve --kv-offloading-backend pykvcache` makes of its arguments."""
    from vllm.engine.arg_utils import EngineArgs

    transfer = {"kv_connector_extra_config": dict(options), **arguments.pop("transfer", {})}
    return EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_offloading_backend="pykvcache",
        kv_transfer_config=transfer,
        **arguments,
    ).create_engine_config()


def refusal(model: Path, options: Mapping[str, Any], **arguments: Any) -> str:
    """The message of the refusal; its traceback must not lead into this project's files."""
    with pytest.raises(ValueError) as refused:
        configure(model, options, **arguments)
    frames = traceback.extract_tb(refused.value.__traceback__)
    ours = [frame.filename for frame in frames if "kv_offload/pykvcache/" in frame.filename]
    assert ours == []
    return str(refused.value)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rot": "/x"}, ["unknown option 'rot'", "did you mean 'root'?", "tokens_per_chunk"]),
        ({"io_depth": "many"}, ["option 'io_depth' is 'many'", "valid integer"]),
        ({"io_depth": 0}, ["option 'io_depth' is 0", "greater than or equal to 1"]),
        ({"direct_io": "maybe"}, ["option 'direct_io' is 'maybe'", "'auto', 'on' or 'off'"]),
        ({"root": 7}, ["option 'root' is 7", "path of a directory"]),
        ({"namespace": "a/b"}, ["option 'namespace' is 'a/b'"]),
        ({"block_size": 16}, ["option 'block_size'", "use 'tokens_per_chunk'"]),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_is_accepted(
    model: Path, options: Mapping[str, Any], words: list[str]
) -> None:
    message = refusal(model, options)
    assert [word for word in words if word not in message] == []


@pytest.mark.usefixtures("environment")
def test_a_bad_value_from_the_environment_names_the_variable(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYKVCACHE_IO_DEPTH", "deep")
    message = refusal(model, {})
    assert "option 'io_depth' (from PYKVCACHE_IO_DEPTH) is 'deep'" in message


@pytest.mark.usefixtures("environment")
def test_another_connector_is_refused(model: Path) -> None:
    message = refusal(
        model, {}, transfer={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    )
    assert "'ExampleConnector'" in message
    assert "leave kv_connector out" in message


@pytest.mark.usefixtures("environment")
def test_a_root_below_a_file_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refusal(model, {"root": str(tmp_path / "file" / "root")})
    assert f"option 'root' is '{tmp_path}/file/root'" in message
    assert "a directory that this user can write" in message


@pytest.mark.usefixtures("environment")
def test_the_same_call_with_good_options_is_accepted(model: Path, tmp_path: Path) -> None:
    config = configure(model, {"root": str(tmp_path / "root"), "io_depth": 4})
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_the_server_ends_with_the_message(site: Site) -> None:
    """A pool too small shows last of all, when the worker knows the size of its blocks."""
    server = site.server("small-pool", pool_gib=0.05)
    with pytest.raises(ServingError, match=r"ended with exit status [1-9]"), server:
        pass
    log = server.options.log.read_text()
    (message, *_) = [line for line in log.splitlines() if "--kv-offloading-size is 0.05" in line]
    assert "would do" in message
    assert server.process_ids == []
