# SPDX-License-Identifier: Apache-2.0
"""Failed transfers through vLLM's own scheduler, connector, aggregator and both model runners'
connector code. Only the model, the storage and the device copies are made up.

`Engine.run` steps as vLLM's engine does, as long as the scheduler says that there is something to
do, and fails after a bounded number of steps. So every test here also shows that the engine
neither stops stepping while a request waits nor goes round for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.kv_offload.pykvcache.failures", reason="needs the patched vLLM")

from vllm.config import (
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import FinishReason, Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.overlay.small_vllm import (
    BLOCKS_PER_CHUNK,
    TOKENS_PER_BLOCK,
    TOKENS_PER_CHUNK,
    device_caches,
    full_attention,
    kv_cache_config,
    offloading_config,
    opt_folder,
    sliding_window,
)
from vllm import SamplingParams
from vllm.v1.kv_offload.pykvcache.failures import ChunkTransferResult

STEPS_MAX = 80
"""Far more than any case needs; reached only when something goes round for ever."""


@dataclass
class Keys(LoadStoreSpec):
    keys: list[OffloadKey]


class Storage(OffloadingManager):
    """A manager whose chunks are a set of keys. It never learns of a failed load."""

    def __init__(self) -> None:
        self.stored: set[OffloadKey] = set()
        self.storing: Counter[OffloadKey] = Counter()
        self.loading: Counter[OffloadKey] = Counter()
        self.failed_stores: list[OffloadKey] = []
        self.loads: list[list[OffloadKey]] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.stored else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.loading.update(keys)
        self.loads.append(list(keys))
        return Keys(list(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.loading.subtract(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        new = [key for key in keys if key not in self.stored and not self.storing[key]]
        self.storing.update(new)
        return PrepareStoreOutput(new, Keys(new), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.storing.subtract(keys)
        if success:
            self.stored.update(keys)
        else:
            self.failed_stores.extend(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def reset_cache(self) -> None:
        self.stored.clear()
        self.storing.clear()
        self.loading.clear()

    def assert_nothing_in_use(self) -> None:
        assert not +self.loading and not -self.loading
        assert not +self.storing and not -self.storing


class ObservingStorage(Storage):
    """A manager that forgets what could not be loaded."""

    def on_load_failed(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        assert not any(self.loading[key] for key in keys), "told before the load was completed"
        self.stored.difference_update(keys)


@dataclass(frozen=True)
class Job:
    job_id: int
    is_load: bool
    keys: list[OffloadKey]
    gpu: GPULoadStoreSpec

    def blocks_of(self, chosen: Collection[OffloadKey]) -> frozenset[int]:
        """GPU blocks of some of the job's keys (jobs of one KV cache group only)."""
        start = int(self.gpu.block_indices[0])
        first_chunk = start // BLOCKS_PER_CHUNK
        return frozenset(
            int(block)
            for position, block in enumerate(self.gpu.block_ids, start)
            if self.keys[position // BLOCKS_PER_CHUNK - first_chunk] in chosen
        )


Outcome = Callable[[Job], TransferResult]


def succeed(job: Job) -> TransferResult:
    return TransferResult(job.job_id, success=True)


def fail_plainly(job: Job) -> TransferResult:
    """What a backend that knows nothing of chunks can say."""
    return TransferResult(job.job_id, success=False)


def fail_chunks(*positions: int) -> Outcome:
    def outcome(job: Job) -> TransferResult:
        failed = frozenset(job.keys[at] for at in positions if at < len(job.keys))
        if not failed:
            return succeed(job)
        return ChunkTransferResult(
            job.job_id, success=False, failed_keys=failed, invalid_block_ids=job.blocks_of(failed)
        )

    return outcome


class ScriptedWorker(OffloadingWorker):
    """Ends each job with the outcome that the test chose, some steps after its submission."""

    def __init__(self) -> None:
        self.on_load: Outcome = succeed
        self.on_store: Outcome = succeed
        self.steps_per_load = 1
        self.pending: list[tuple[int, Job]] = []
        self.step = 0

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        assert isinstance(src_spec, Keys)
        due = self.step + self.steps_per_load
        self.pending.append((due, Job(job_id, True, src_spec.keys, dst_spec)))
        return True

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, Keys)
        self.pending.append((self.step + 1, Job(job_id, False, dst_spec.keys, src_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        self.step += 1
        due = [job for step, job in self.pending if step <= self.step]
        self.pending = [(step, job) for step, job in self.pending if step > self.step]
        return [(self.on_load if job.is_load else self.on_store)(job) for job in due]

    def wait(self, job_ids: set[int]) -> None:
        self.pending = [
            (self.step if job.job_id in job_ids else step, job) for step, job in self.pending
        ]


@dataclass
class Setup:
    """What the parametrized fixture chose."""

    model_dir: Path
    monkeypatch: pytest.MonkeyPatch
    model_runner: str
    async_scheduling: bool


@dataclass
class Step:
    scheduler_output: SchedulerOutput
    sampled: dict[str, list[int]]
    connector_output: KVConnectorOutput | None


@dataclass
class Engine:
    setup: Setup
    storage: Storage
    policy: str | None = "recompute"
    specs: tuple[KVCacheSpec, ...] = field(default_factory=lambda: (full_attention(),))
    world_size: int = 1
    inside_multi_connector: bool = False

    def __post_init__(self) -> None:
        self.workers: list[ScriptedWorker] = []
        self.finished: dict[str, FinishReason | None] = {}
        self.computed_from: dict[str, list[int]] = {}
        self.steps_taken = 0
        self._requests: dict[str, Request] = {}
        self._delayed: Step | None = None
        self._aggregator = KVOutputAggregator(self.world_size)
        self._register_spec()
        self.config = self._vllm_config()
        self.kv_cache_config = kv_cache_config(self.specs)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(
            self.kv_cache_config, self.config
        )
        scheduler = AsyncScheduler if self.setup.async_scheduling else Scheduler
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        self._ranks = [self._rank() for _ in range(self.world_size)]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(TOKENS_PER_BLOCK, sha256)

    def _register_spec(self) -> None:
        storage, workers = self.storage, self.workers

        class FakeSpec(OffloadingSpec):
            def get_manager(self) -> OffloadingManager:
                return storage

            def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
                workers.append(ScriptedWorker())
                return workers[-1]

        self.setup.monkeypatch.setitem(
            OffloadingSpecFactory._registry, "FakeSpec", lambda: FakeSpec
        )

    def _vllm_config(self) -> VllmConfig:
        policy = {} if self.policy is None else {"kv_load_failure_policy": self.policy}
        config = offloading_config(
            self.setup.model_dir,
            "FakeSpec",
            inside_multi_connector=self.inside_multi_connector,
            connector=policy,
            max_num_seqs=8,
        )
        config.scheduler_config.async_scheduling = self.setup.async_scheduling
        config.parallel_config.world_size = self.world_size
        return config

    def _rank(self) -> Callable[[SchedulerOutput], KVConnectorOutput | None]:
        """One worker's share of a step, by the code of one of vLLM's two model runners."""
        connector = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.kv_cache_config
        )
        caches = device_caches(self.kv_cache_config)
        use = self.setup.monkeypatch.setattr
        use(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        if self.setup.model_runner == "v2":
            with set_current_vllm_config(self.config):
                active = ActiveKVConnector(self.config, caches)
            return lambda output: active.no_forward(output).kv_connector_output
        with set_current_vllm_config(self.config):
            connector.register_kv_caches(caches)

        def step(output: SchedulerOutput) -> KVConnectorOutput | None:
            use(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
            assert output.kv_connector_metadata is not None
            connector.handle_preemptions(output.kv_connector_metadata)
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(
                output, self.config
            ).kv_connector_output

        return step

    def add(self, name: str, num_tokens: int) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._requests[name] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        self.steps_taken += 1
        assert self.steps_taken < STEPS_MAX, "the engine goes round and round"
        output = self.scheduler.schedule()
        sampled: dict[str, list[int]] = {}
        for name, num_tokens in output.num_scheduled_tokens.items():
            request = self._requests[name]
            start = request.num_computed_tokens - num_tokens
            self.computed_from.setdefault(name, []).append(start)
            sampled[name] = [] if request.is_prefill_chunk else [1]
        step = Step(output, sampled, self._connector_output(output))
        if not self.setup.async_scheduling:
            self._update(step)
            return
        # The scheduler has planned this step before it sees the output of the one before.
        ready, self._delayed = self._delayed, step
        if ready is not None:
            self._update(ready)

    def _connector_output(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput([], {}, kv_connector_output=rank(output)) for rank in self._ranks
        ]
        if self.world_size == 1:
            assert outputs[0] is not None
            return outputs[0].kv_connector_output
        merged = self._aggregator.aggregate(outputs)
        assert merged is not None
        return merged.kv_connector_output

    def _update(self, step: Step) -> None:
        names = list(step.sampled)
        outputs = self.scheduler.update_from_output(
            step.scheduler_output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[step.sampled[name] for name in names],
                kv_connector_output=step.connector_output,
            ),
        )
        for client in outputs.values():
            for out in client.outputs:
                if out.finish_reason is not None:
                    self.finished[out.request_id] = out.finish_reason

    def run(self) -> None:
        """Step until the scheduler has nothing left to do, as vLLM's engine core does."""
        while True:
            if self.scheduler.has_requests():
                self.step()
            elif self._delayed is not None:
                delayed, self._delayed = self._delayed, None
                self._update(delayed)
            else:
                break
        self._assert_at_rest()

    def _assert_at_rest(self) -> None:
        self.storage.assert_nothing_in_use()
        assert not self.scheduler.requests
        assert not self.scheduler.failed_recving_kv_req_ids
        assert not self.scheduler.finished_recving_kv_req_ids
        pool = self.scheduler.kv_cache_manager.block_pool
        assert all(block.ref_cnt == 0 or block.is_null for block in pool.blocks)

    def forget_gpu_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def store(self, num_chunks: int) -> list[OffloadKey]:
        """Fill the storage with the chunks of a prompt; return the first group's, in order."""
        self.add("writer", num_chunks * TOKENS_PER_CHUNK + 1)
        self.run()
        self.forget_gpu_cache()
        self.add("reader", num_chunks * TOKENS_PER_CHUNK + 1)
        self.run()
        assert self.computed_from["reader"][0] == num_chunks * TOKENS_PER_CHUNK
        assert set(self.finished.values()) == {FinishReason.LENGTH}
        self.finished.clear()
        self.forget_gpu_cache()
        keys = [key for key in self.storage.loads.pop() if get_offload_group_idx(key) == 0]
        assert len(keys) == num_chunks
        self.steps_taken = 0
        return keys


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return opt_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["v1-sync", "v1-async", "v2-async"])
def setup(
    request: pytest.FixtureRequest, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setup]:
    runner, scheduling = request.param.split("-")
    yield Setup(model_dir, monkeypatch, runner, scheduling == "async")


@pytest.fixture(params=[Storage, ObservingStorage], ids=["unaware", "observing"])
def storage(request: pytest.FixtureRequest) -> Storage:
    made = request.param()
    assert isinstance(made, Storage)
    return made


PROMPT = 4 * TOKENS_PER_CHUNK + 5


def test_load_without_failure_computes_only_the_tail(setup: Setup, storage: Storage) -> None:
    engine = Engine(setup, storage)
    engine.store(4)
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert engine.computed_from["a"] == [4 * TOKENS_PER_CHUNK]


def test_recomputes_from_the_first_failed_chunk_on(setup: Setup, storage: Storage) -> None:
    engine = Engine(setup, storage)
    engine.store(4)
    engine.workers[0].on_load = fail_chunks(1, 3)
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert engine.computed_from["a"] == [TOKENS_PER_CHUNK]
    assert len(storage.loads) == 1


@pytest.mark.parametrize("warm_tokens", [TOKENS_PER_CHUNK, TOKENS_PER_CHUNK + TOKENS_PER_BLOCK])
def test_keeps_what_the_gpu_cache_held(setup: Setup, storage: Storage, warm_tokens: int) -> None:
    """The load begins behind the GPU's own hit, also in the middle of a chunk, and fails there."""
    engine = Engine(setup, storage)
    engine.store(4)
    engine.add("warm", warm_tokens + 5)
    engine.run()
    engine.workers[0].on_load = fail_chunks(0)
    engine.add("a", PROMPT)
    engine.run()
    assert engine.computed_from["a"] == [warm_tokens]


def test_failed_chunk_is_stored_again(setup: Setup) -> None:
    storage = ObservingStorage()
    engine = Engine(setup, storage)
    keys = engine.store(4)
    engine.workers[0].on_load = fail_chunks(2)
    engine.add("a", PROMPT)
    while keys[2] in storage.stored:
        engine.step()
    assert set(keys) - storage.stored == {keys[2]}
    engine.run()
    assert set(keys) <= storage.stored


def test_always_failing_chunk_ends_in_recomputation(setup: Setup, storage: Storage) -> None:
    """The first chunk fails whenever it is loaded, and an unaware manager keeps offering it."""
    engine = Engine(setup, storage)
    engine.store(4)
    engine.workers[0].on_load = fail_chunks(0)
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert engine.computed_from["a"] == [0]
    assert len(storage.loads) == 1


def test_plain_failure_recomputes_everything(setup: Setup, storage: Storage) -> None:
    engine = Engine(setup, storage)
    engine.store(4)
    engine.workers[0].on_load = fail_plainly
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert engine.computed_from["a"] == [0]
    assert len(storage.loads) == 1


@pytest.mark.parametrize("outcome", [fail_plainly, fail_chunks(1)], ids=["plain", "chunk"])
@pytest.mark.parametrize("policy", ["fail", None])
def test_policy_fail_ends_the_request_with_an_error(
    setup: Setup, storage: Storage, policy: str | None, outcome: Outcome
) -> None:
    engine = Engine(setup, storage, policy=policy)
    engine.store(4)
    engine.workers[0].on_load = outcome
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.ERROR}
    assert "a" not in engine.computed_from
    engine.workers[0].on_load = succeed
    engine.add("b", PROMPT)
    engine.run()
    assert engine.finished["b"] is FinishReason.LENGTH


@pytest.mark.parametrize("slower", [0, 1])
@pytest.mark.parametrize(
    ("first", "second", "resumes_at"),
    [
        pytest.param(fail_chunks(1), succeed, 1, id="one-rank"),
        pytest.param(fail_chunks(1), fail_chunks(2), 1, id="both-ranks"),
        pytest.param(fail_chunks(3), fail_chunks(1, 2), 1, id="second-earlier"),
        pytest.param(fail_chunks(2), fail_plainly, 0, id="chunk-and-plain"),
        pytest.param(fail_plainly, succeed, 0, id="plain"),
    ],
)
def test_ranks_that_report_at_different_steps(
    setup: Setup,
    storage: Storage,
    first: Outcome,
    second: Outcome,
    resumes_at: int,
    slower: int,
) -> None:
    engine = Engine(setup, storage, world_size=2)
    engine.store(4)
    engine.workers[0].on_load, engine.workers[1].on_load = first, second
    engine.workers[slower].steps_per_load = 5
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert engine.computed_from["a"] == [resumes_at * TOKENS_PER_CHUNK]


def test_failure_on_a_rank_makes_the_chunk_a_miss(setup: Setup) -> None:
    storage = Storage()
    engine = Engine(setup, storage, world_size=2)
    engine.workers[1].on_store = fail_chunks(1)
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert len(storage.stored) == 3
    assert len(storage.failed_stores) == 1
    engine.forget_gpu_cache()
    engine.add("b", PROMPT)
    engine.run()
    assert engine.computed_from["b"] == [TOKENS_PER_CHUNK]


def test_plainly_failed_store_stores_nothing(setup: Setup) -> None:
    storage = Storage()
    engine = Engine(setup, storage)
    engine.workers[0].on_store = fail_plainly
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert not storage.stored
    assert len(storage.failed_stores) == 4


@pytest.mark.parametrize("outcome", [fail_plainly, fail_chunks(1)], ids=["plain", "chunk"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_request_aborted_before_its_load_fails(
    setup: Setup, storage: Storage, policy: str, outcome: Outcome
) -> None:
    engine = Engine(setup, storage, policy=policy, world_size=2)
    keys = engine.store(4)
    engine.workers[0].on_load, engine.workers[1].on_load = outcome, outcome
    engine.workers[1].steps_per_load = 6
    engine.add("a", PROMPT)
    for _ in range(3):
        engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert "a" not in engine.computed_from
    assert storage.stored <= set(keys)
    for worker in engine.workers:
        worker.on_load = succeed
    engine.add("b", PROMPT)
    engine.run()
    assert engine.finished["b"] is FinishReason.LENGTH


def test_request_aborted_after_one_rank_reported_the_failure(
    setup: Setup, storage: Storage
) -> None:
    engine = Engine(setup, storage, world_size=2)
    engine.store(4)
    engine.workers[0].on_load = fail_chunks(1)
    engine.workers[1].steps_per_load = 8
    engine.add("a", PROMPT)
    while not engine.scheduler.failed_recving_kv_req_ids:
        engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert "a" not in engine.computed_from


@pytest.mark.parametrize("outcome", [fail_plainly, fail_chunks(1)], ids=["plain", "chunk"])
def test_cache_reset_while_the_load_that_fails_is_in_flight(
    setup: Setup, storage: Storage, outcome: Outcome
) -> None:
    """The connector has forgotten the job by the time it is reported."""
    engine = Engine(setup, storage)
    engine.store(4)
    engine.workers[0].on_load = outcome
    engine.workers[0].steps_per_load = 8
    engine.add("a", PROMPT)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_connector_cache()
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}


def test_second_request_waits_for_the_shared_chunks_and_then_loads(
    setup: Setup, storage: Storage
) -> None:
    """A request that waited for a load in flight must not wait for ever when it fails."""
    engine = Engine(setup, storage)
    engine.store(4)
    engine.workers[0].on_load = fail_chunks(2)
    engine.add("a", PROMPT)
    engine.add("b", PROMPT + 3)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert engine.computed_from["a"] == [2 * TOKENS_PER_CHUNK]


@pytest.mark.parametrize(
    ("outcome", "resumes_at"), [(fail_plainly, 0), (fail_chunks(1), 1)], ids=["plain", "chunk"]
)
def test_failure_inside_a_multi_connector(
    setup: Setup, storage: Storage, outcome: Outcome, resumes_at: int
) -> None:
    engine = Engine(setup, storage, inside_multi_connector=True)
    engine.store(4)
    engine.workers[0].on_load = outcome
    engine.add("a", PROMPT)
    engine.run()
    assert engine.finished == {"a": FinishReason.LENGTH}
    assert engine.computed_from["a"] == [resumes_at * TOKENS_PER_CHUNK]


def test_several_groups_recompute_the_whole_prefix_then_load_less(
    setup: Setup, storage: Storage
) -> None:
    """Block ids would be ambiguous here. The retry stays below the chunk that failed."""
    engine = Engine(setup, storage, specs=(full_attention(), sliding_window()))
    engine.store(6)
    failing = storage.stored.copy()
    prompt = 6 * TOKENS_PER_CHUNK + 5

    def fail_fourth_chunk(job: Job) -> TransferResult:
        full = [key for key in job.keys if get_offload_group_idx(key) == 0]
        if len(full) < 4:
            return succeed(job)
        return ChunkTransferResult(
            job.job_id,
            success=False,
            failed_keys=frozenset(full[3:4]),
            invalid_block_ids=frozenset(int(block) for block in job.gpu.block_ids),
        )

    engine.workers[0].on_load = fail_fourth_chunk
    engine.add("a", prompt)
    engine.run()
    assert failing
    assert engine.finished == {"a": FinishReason.LENGTH}
    (start,) = engine.computed_from["a"]
    assert start <= 3 * TOKENS_PER_CHUNK
    assert len(storage.loads) <= 2


def test_single_sliding_window_group_never_resumes_inside_its_window(
    setup: Setup, storage: Storage
) -> None:
    """Only the window before the hit is loaded; its middle has nothing to attend to."""
    engine = Engine(setup, storage, specs=(sliding_window(),))
    engine.add("writer", 6 * TOKENS_PER_CHUNK + 1)
    engine.run()
    engine.forget_gpu_cache()

    def fail_last_chunk(job: Job) -> TransferResult:
        return fail_chunks(len(job.keys) - 1)(job)

    engine.workers[0].on_load = fail_last_chunk
    engine.add("a", 6 * TOKENS_PER_CHUNK + 5)
    engine.run()
    assert engine.finished["a"] is FinishReason.LENGTH
    assert storage.loads
    assert engine.computed_from["a"] == [0]
