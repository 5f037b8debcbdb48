# SPDX-License-Identifier: Apache-2.0
"""From vLLM's look-up to the gate and back, through vLLM's own scheduler and connector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.gate", reason="needs the patched vLLM")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.request import RequestStatus

from pykvcache.config import Config
from pykvcache.gate.calibration import (
    CalibrationFile,
    ComputeCurve,
    Fingerprint,
    TierCurve,
    calibration_path,
    save_calibration,
)
from pykvcache.gate.terms import LoadSample, StepSample, Traffic
from pykvcache.machine import Machine
from tests.overlay.small_engine import Engine
from tests.overlay.small_vllm import (
    TOKENS_PER_CHUNK,
    full_attention,
    opt_folder,
    sliding_window,
)
from vllm.v1.kv_offload.pykvcache import gate as gate_module
from vllm.v1.kv_offload.pykvcache.gate import TRIAL_STORES, KVSize, SchedulerGate, make_gate
from vllm.v1.kv_offload.pykvcache.plan import ChunkSpec
from vllm.v1.kv_offload.pykvcache.reports import LoadReport, WorkerReport

CHUNK_BYTES = 1 << 20
SIZE = KVSize(CHUNK_BYTES, CHUNK_BYTES / TOKENS_PER_CHUNK, tokens_max=2048, dram=False)


@dataclass
class Known:
    """Prices that are known: a chunk takes 1 s to compute, and so long to load."""

    disk_s: float = 0.1
    dram_s: float = 0.01
    has_learned: bool = True
    steps: list[StepSample] = field(default_factory=list)
    loads: list[LoadSample] = field(default_factory=list)

    def compute_s(self, start: int, end: int, traffic: Traffic) -> float:
        return max(0, end - start) / TOKENS_PER_CHUNK

    def load_s(self, dram_bytes: int, disk_bytes: int, traffic: Traffic) -> float:
        ahead = traffic.disk_bytes if disk_bytes else 0
        return ((disk_bytes + ahead) * self.disk_s + dram_bytes * self.dram_s) / CHUNK_BYTES

    def wants_probe(self, now: float) -> bool:
        return False

    def begin_probe(self, now: float) -> None:
        raise AssertionError("nothing wants a probe")

    def observe_step(self, sample: StepSample) -> None:
        self.steps.append(sample)

    def observe_load(self, sample: LoadSample, now: float) -> None:
        self.loads.append(sample)

    def bytes_per_s(self, tier: str) -> float:
        return CHUNK_BYTES / (self.disk_s if tier == "disk" else self.dram_s)

    def summary(self) -> dict[str, float]:
        return {"disk_s": self.disk_s}


@dataclass
class Gated:
    """An engine with a gate whose prices and clock are known."""

    known: Known
    gate: SchedulerGate
    engine: Engine
    time: list[float]

    def loads(self) -> list[int]:
        """Chunks of each load."""
        return [len(keys) for what, keys in self.engine.worker.calls if what == "load"]

    def run(self, *names: str) -> None:
        """Until these have ended."""
        while any(name in self.engine.scheduler.requests for name in names):
            self.engine.step()


MakeGated = Callable[..., Gated]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return opt_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def gated(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeGated:
    def make(
        only_counts: bool = False, engine: dict[str, Any] | None = None, **prices: Any
    ) -> Gated:
        known, time = Known(**prices), [0.0]
        made = SchedulerGate(
            known,  # type: ignore[arg-type]
            SIZE,
            margin=0.05,
            only_counts=only_counts,
            clock=lambda: time[0],
        )
        options = {"gate": made, "options": {"preload_lookahead": 0}, **(engine or {})}
        return Gated(
            known, made, Engine(model_dir, tmp_path / "root", monkeypatch, **options), time
        )

    return make


def in_dram(gated: Gated, keys: list[OffloadKey]) -> None:
    gated.engine.manager.note_dram(dict.fromkeys(keys, 1))


# --- what is loaded


def test_a_hit_that_pays_is_loaded_whole(gated: MakeGated) -> None:
    it = gated(disk_s=0.5)
    it.engine.add("B", 5)
    it.run("B")
    assert it.loads() == [5]
    assert not it.gate.declined_loads


def test_a_hit_that_does_not_pay_is_computed(gated: MakeGated) -> None:
    it = gated(disk_s=2.0)
    request = it.engine.add("B", 5)
    it.engine.step()
    assert request.status is RequestStatus.RUNNING or request.is_finished()
    it.run("B")
    assert it.loads() == []
    assert it.gate.declined_loads == {"slower": 1}
    assert it.gate.declined_tokens == {"slower": 5 * TOKENS_PER_CHUNK}


def test_of_a_slow_disk_only_what_is_in_dram_is_loaded(gated: MakeGated) -> None:
    it = gated(disk_s=2.0)
    request = it.engine.add("B", 5)
    in_dram(it, it.engine.keys(request)[:2])
    it.run("B")
    assert it.loads() == [2]
    assert it.gate.declined_loads == {"partial": 1}
    assert it.gate.declined_tokens == {"partial": 3 * TOKENS_PER_CHUNK}


def test_reads_for_others_can_make_a_load_too_late(gated: MakeGated) -> None:
    it = gated(disk_s=0.5)
    it.engine.worker.unread_bytes = 100 * CHUNK_BYTES
    it.engine.occupy()
    it.engine.abort("A")
    it.engine.add("B", 5)
    it.run("B")
    assert it.loads() == []
    assert it.gate.declined_loads == {"busy": 1}


def test_the_disk_reads_on_during_a_step(gated: MakeGated) -> None:
    it = gated(disk_s=0.5)
    it.engine.worker.unread_bytes = 10 * CHUNK_BYTES
    it.engine.occupy()
    assert it.gate.workload.traffic("B").disk_bytes == 10 * CHUNK_BYTES
    it.time[0] += 3.0
    assert it.gate.workload.traffic("B").disk_bytes == 4 * CHUNK_BYTES
    it.time[0] += 3.0
    assert it.gate.workload.traffic("B").disk_bytes == 0


def test_a_load_that_no_worker_has_seen_yet_counts_as_a_read(gated: MakeGated) -> None:
    it = gated(disk_s=0.5)
    it.gate.workload.plan_load(7 * CHUNK_BYTES)
    assert it.gate.workload.traffic("B").disk_bytes == 7 * CHUNK_BYTES
    it.engine.step()
    assert it.gate.workload.traffic("B").disk_bytes == 0


def test_long_hits_are_compared_at_few_ends() -> None:
    where = [True] * 100 + [False] * 300
    counts = gate_module._counts(where)
    assert counts[0] == 1 and counts[-1] == 400 and 100 in counts
    assert len(counts) == gate_module.REACHES_MAX
    alternating = [at % 2 == 0 for at in range(400)]
    assert len(gate_module._counts(alternating)) <= gate_module.REACHES_MAX
    assert gate_module._counts([False] * 3) == [1, 2, 3]


def test_always_loads_and_counts_what_would_be_declined(gated: MakeGated) -> None:
    it = gated(only_counts=True, disk_s=2.0)
    it.engine.add("B", 5)
    it.run("B")
    assert it.loads() == [5]
    assert it.gate.declined_tokens == {"slower": 5 * TOKENS_PER_CHUNK}


@pytest.mark.parametrize(
    ("wanted", "loads"), [("always", [5]), ("auto", []), ("sometimes", []), ([], []), (None, [])]
)
def test_a_request_may_want_everything(gated: MakeGated, wanted: Any, loads: list[int]) -> None:
    it = gated(disk_s=2.0)
    it.engine.add("B", 5, params={"pykvcache_gate": wanted})
    it.run("B")
    assert it.loads() == loads
    assert it.engine.manager.gate is not None


def test_what_clients_send_is_told_once(gated: MakeGated, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        gate_module.logger, "warning", lambda text, *values: lines.append(text % values)
    )
    it = gated()
    for name in "BCD":
        it.engine.add(name, 2, params={"pykvcache_gate": name * 100})
        it.run(name)
    (line,) = lines
    assert "must be 'auto' or 'always'" in line and len(line) < 250


def test_of_a_sliding_window_all_is_loaded_or_nothing(gated: MakeGated) -> None:
    it = gated(disk_s=2.0, engine={"specs": (full_attention(), sliding_window())})
    request = it.engine.add("B", 5)
    in_dram(it, [key for group in (0, 1) for key in it.engine.keys(request, group)[:2]])
    it.run("B")
    assert it.loads() == []
    assert it.gate.declined_loads == {"slower": 1}


def test_a_request_that_is_looked_up_twice_is_counted_once(gated: MakeGated) -> None:
    it = gated(disk_s=2.0)
    request = it.engine.add("B", 5)
    connector = it.engine.scheduler.connector
    assert connector is not None
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not it.gate.declined_loads
    it.run("B")
    assert it.gate.declined_loads == {"slower": 1}


def test_a_gate_that_fails_lets_everything_be_loaded(
    gated: MakeGated, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = gated(disk_s=2.0)

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(it.known, "compute_s", fail)
    it.engine.add("B", 5)
    it.run("B")
    assert it.loads() == [5]
    assert it.engine.manager.gate is None


def test_a_miss_is_no_decision(gated: MakeGated) -> None:
    it = gated(disk_s=2.0)
    it.engine.add("B", 5, on_disk=False)
    it.run("B")
    assert not it.gate.declined_loads


# --- what is read ahead

READS_AHEAD = {"options": {"preload_lookahead": 3}}


def test_what_will_not_be_loaded_is_not_read_ahead(gated: MakeGated) -> None:
    it = gated(disk_s=2.0, engine=READS_AHEAD)
    it.engine.occupy()
    it.engine.add("B", 5)
    it.engine.step()
    assert it.engine.plan == []


def test_what_pays_is_read_ahead(gated: MakeGated) -> None:
    it = gated(disk_s=0.5, engine=READS_AHEAD)
    it.engine.occupy()
    request = it.engine.add("B", 5)
    it.engine.step()
    assert it.engine.plan == it.engine.keys(request)


def test_a_slow_disk_has_time_for_whoever_waits_long(gated: MakeGated) -> None:
    it = gated(disk_s=2.0, engine=READS_AHEAD)
    it.engine.occupy()
    it.engine.add("B", 6, on_disk=False)
    request = it.engine.add("C", 9)
    it.engine.step()
    # 6 s until B is computed: three chunks come for nothing, and a fourth costs 2 s for 1.
    assert it.engine.plan == it.engine.keys(request)[:3]


@pytest.mark.parametrize("how", ["only_counts", "request"])
def test_what_is_loaded_anyhow_is_read_ahead(gated: MakeGated, how: str) -> None:
    it = gated(only_counts=how == "only_counts", disk_s=2.0, engine=READS_AHEAD)
    it.engine.occupy()
    params = {"pykvcache_gate": "always"} if how == "request" else None
    request = it.engine.add("B", 5, params=params)
    it.engine.step()
    assert it.engine.plan == it.engine.keys(request)


# --- what is learned


def each_step_takes(it: Gated, seconds: float) -> None:
    report = it.engine.worker.take_report

    def take_report() -> WorkerReport:
        it.time[0] += seconds
        return report()

    it.engine.worker.take_report = take_report  # type: ignore[method-assign]


def test_steps_teach_what_they_computed(gated: MakeGated) -> None:
    it = gated()
    each_step_takes(it, 2.0)
    it.engine.occupy()
    it.engine.step()
    prompt = TOKENS_PER_CHUNK + 5
    assert it.known.steps == [
        StepSample(prompt, prompt * (prompt - 1) // 2, 0, 2.0),
        StepSample(0, 0, 1, 2.0),
    ]


def test_a_request_that_begins_again_is_a_prompt_again(gated: MakeGated) -> None:
    it = gated()
    request = it.engine.occupy()
    it.engine.step()
    scheduler = it.engine.scheduler
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    it.engine.step()
    assert [sample.decodes for sample in it.known.steps] == [0, 1, 0]
    # Its chunk is still in the GPU's prefix cache; two tokens were generated.
    assert it.known.steps[2].tokens == 5 + 2
    it.engine.step()
    assert it.known.steps[3].decodes == 1


def test_the_context_of_computed_tokens_is_told(gated: MakeGated) -> None:
    it = gated(disk_s=0.5)
    it.engine.add("B", 5)
    each_step_takes(it, 2.0)
    it.run("B")
    loaded = 5 * TOKENS_PER_CHUNK
    assert it.known.steps == [StepSample(5, 5 * loaded + 10, 0, 2.0)]


def test_loads_teach_what_they_took(gated: MakeGated) -> None:
    it = gated()
    it.engine.worker.load_reports = {7: LoadReport(10, 20, 30, 0.5)}
    it.engine.occupy()
    assert it.known.loads == [LoadSample(10, 20, 30, 0.5)]


def test_the_end_of_a_load_is_noticed_after_half_a_step_of_others(gated: MakeGated) -> None:
    it = gated()
    each_step_takes(it, 2.0)
    assert it.gate.workload.traffic("B").notice_s == 0
    it.engine.occupy()
    assert it.gate.workload.traffic("B") == Traffic(notice_s=1.0)
    it.engine.step()
    assert it.gate.workload.traffic("B") == Traffic(decodes=1, notice_s=1.0)
    it.engine.abort("A")
    assert it.gate.workload.traffic("B") == Traffic()


def test_who_was_admitted_before_is_waited_for(gated: MakeGated) -> None:
    it = gated()
    request = it.engine.add("B", 5, on_disk=False)
    connector = it.engine.scheduler.connector
    assert connector is not None
    connector.get_num_new_matched_tokens(request, 0)
    wait_s = it.gate.workload.traffic("C").wait_s
    assert wait_s == pytest.approx(request.num_tokens / TOKENS_PER_CHUNK)
    assert it.gate.workload.traffic("B").wait_s == 0
    it.engine.step()
    assert it.gate.workload.traffic("C").wait_s == 0


def test_a_prompt_that_takes_several_steps_is_waited_for(
    gated: MakeGated, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = gated()
    scheduler = it.engine.scheduler
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 2 * TOKENS_PER_CHUNK)
    it.engine.add("B", 5, on_disk=False)
    it.engine.step()
    left = 3 + 5 / TOKENS_PER_CHUNK
    assert it.gate.workload.traffic("C").wait_s == pytest.approx(left)
    it.engine.abort("B")
    it.engine.step()
    assert it.gate.workload.traffic("C").wait_s == 0


def test_a_step_on_its_way_is_waited_for(gated: MakeGated) -> None:
    it = gated()
    it.engine.add("B", 3, on_disk=False)
    it.engine.scheduler.schedule()
    whole = 3 + 5 / TOKENS_PER_CHUNK
    assert it.gate.workload.traffic("C").wait_s == pytest.approx(whole)
    it.time[0] += 1.0
    assert it.gate.workload.traffic("C").wait_s == pytest.approx(whole - 1.0)
    it.time[0] += 100.0
    assert it.gate.workload.traffic("C").wait_s == 0


# --- stores


def stored(it: Gated, name: str) -> int:
    """Chunks that a request is allowed to store, of one."""
    key = make_offload_key(name.encode().ljust(32, b"."), 0)
    context = ReqContext(name)
    it.engine.manager.on_new_request(context)
    plan = it.engine.manager.prepare_store([key], context)
    it.engine.manager.on_request_finished(context)
    assert plan is not None and isinstance(plan.store_spec, ChunkSpec)
    assert plan.keys_to_store == list(plan.store_spec.keys)
    return len(plan.keys_to_store)


def test_what_could_never_be_worth_a_load_is_stored_once_in_a_while(gated: MakeGated) -> None:
    it = gated(disk_s=100.0)
    total = 2 * TRIAL_STORES
    assert sum(stored(it, f"request {number}") for number in range(total)) == 2
    assert it.gate.declined_stores == total - 2
    assert it.engine.manager._catalog.storing == 2


def test_a_request_is_stored_as_a_whole_or_not(gated: MakeGated) -> None:
    it = gated(disk_s=100.0)
    assert it.gate.admits_store("a", 1)
    assert not it.gate.admits_store("b", 1)
    assert it.gate.admits_store("a", 1)
    assert not it.gate.admits_store("b", 1)


@pytest.mark.parametrize(
    "prices", [{"disk_s": 0.5}, {"disk_s": 100.0, "has_learned": False}], ids=["fast", "unknown"]
)
def test_everything_is_stored_unless_a_slow_disk_is_known(
    gated: MakeGated, prices: dict[str, Any]
) -> None:
    it = gated(**prices)
    assert all(stored(it, f"request {number}") for number in range(40))
    assert not it.gate.declined_stores


def test_stores_go_on_when_the_disk_recovers(gated: MakeGated) -> None:
    it = gated(disk_s=100.0)
    stored(it, "a")
    assert not stored(it, "b")
    it.known.disk_s = 0.5
    it.time[0] += 2.0
    assert stored(it, "c")


# --- metrics


def test_figures_reach_the_metrics(gated: MakeGated) -> None:
    manager = gated(disk_s=2.0).engine.manager
    manager.get_stats()
    assert manager.gate is not None
    manager.gate.declined_loads["slower"] += 1
    manager.gate.declined_tokens["slower"] += 160
    stats = manager.get_stats()
    assert stats is not None
    written = repr(stats.data)
    assert "vllm:kv_offload_declined_loads" in written
    assert "vllm:kv_offload_declined_tokens" in written
    assert "vllm:kv_offload_gate_load_bytes_per_second" in written
    assert manager.get_stats() is None


# --- calibrations

NOW = datetime.now(UTC)
FINGERPRINT = Fingerprint(
    machine=Machine(cpu="a", cpus=2, ram_gib=4, gpus=(), filesystem="ext4", storage="/dev/vda"),
    model={"model": "m"},
)


def content(**changes: Any) -> CalibrationFile:
    tier = TierCurve(bytes=(10, 20), tokens=(256, 512), seconds=(0.1, 0.2))
    fields: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "versions": {},
        "date": NOW,
        "f": {},
        "compute": ComputeCurve(step_s=0.1, tokens=(256, 512), seconds=(1.0, 2.0)),
        "tiers": {"disk": tier},
        "error": {},
        "samples": (),
    }
    return CalibrationFile(**{**fields, **changes})


OTHER = Fingerprint(machine=FINGERPRINT.machine, model={"model": "other"})
REFUSED = {
    "malformed": ("{", "is not JSON"),
    "foreign": (content(fingerprint=OTHER), "is of another model"),
    "stale": (content(date=NOW - timedelta(days=400)), "date is"),
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            gate_module.logger, level, lambda text, *values: lines.append(text % values)
        )
    return lines


@pytest.mark.parametrize("by_path", [False, True], ids=["found", "named"])
def test_a_calibration_of_this_server_is_used(
    tmp_path: Path, told: list[str], by_path: bool
) -> None:
    path = tmp_path / "named.json" if by_path else calibration_path(tmp_path, FINGERPRINT)
    save_calibration(content(), path)
    options = Config(root=tmp_path, gate_path=str(path) if by_path else "")
    made = make_gate(options, SIZE, lambda: FINGERPRINT)
    assert made is not None
    assert made.estimate.compute_s(0, 512, Traffic()) == pytest.approx(2.1)
    assert "uses the calibration" in told[0]


@pytest.mark.parametrize(("written", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_calibration_is_told_and_the_server_starts_without(
    tmp_path: Path, told: list[str], written: CalibrationFile | str, message: str
) -> None:
    path = calibration_path(tmp_path, FINGERPRINT)
    path.parent.mkdir(parents=True)
    if isinstance(written, str):
        path.write_text(written)
    else:
        save_calibration(written, path)
    made = make_gate(Config(root=tmp_path), SIZE, lambda: FINGERPRINT)
    assert made is not None and not made.estimate.has_learned
    assert message in told[0] and str(path) in told[0]
    assert "learns while serving" in told[1]


def test_off_makes_no_gate(tmp_path: Path) -> None:
    assert make_gate(Config(root=tmp_path, gate="off"), SIZE, lambda: FINGERPRINT) is None
