"""Decode steps recorded and replayed, over graphs that know nothing but tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.job import SequenceWork
from ballast.core.settings import AdapterSettings
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.plain.attention import PlainAttention
from ballast.models.gpu import adapters as device_adapters
from ballast.models.gpu import executor
from ballast.models.gpu.executor import GpuExecutor
from ballast.models.gpu.graphs import PIECE_BYTES, GraphCache
from ballast.models.gpu.recording import GraphRecorder, Recording
from benchmarks.adapters import random_adapter
from tests.memory.fake_cuda import Misuse
from tests.models.fake_graphs import FakeRecorder, Recorders, StaticAttention, StaticLora
from tests.models.gpu.test_gpu_executor import prompts_of
from tests.models.tiny import GREEDY, Served, llama

STREAM = 7


class Graphed(Served):
    """Served as from a GPU, with graphs."""

    def __init__(self, path: Path, impl: str = "generic", **settings: Any) -> None:
        super().__init__(path, attention=StaticAttention, model_impl=impl, **settings)
        assert isinstance(self.model, GpuExecutor)
        self.device_model = self.model
        self.recorders = Recorders(graph_bytes=1 << 20)
        self.graphs = GraphCache(1 << 30, self.recorders)
        self.device_model._graphs = self.graphs

    def run(self, *work: SequenceWork) -> Tensor:
        with self.graphs.on(STREAM):
            return self.logits(*work)

    def record(self) -> None:
        while self.graphs.wanted:
            self.graphs.record_one()


@pytest.fixture(params=["generic", "fused"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Graphed]:
    llama(tmp_path)
    made = Graphed(tmp_path, request.param)
    yield made
    made.graphs.close()
    assert not made.recorders.graphs
    made.close()


def decode(name: str, token: int, start: int, blocks: list[int]) -> SequenceWork:
    return SequenceWork(name, [token], start, blocks, GREEDY)


def prefilled(served: Graphed, *sizes: int) -> list[SequenceWork]:
    """Of prompts of these sizes, decodes that come after; each has two blocks."""
    found = []
    for i, prompt in enumerate(prompts_of(*sizes)):
        blocks = [2 * i + 1, 2 * i + 2]
        served.logits(SequenceWork(str(i), prompt, 0, blocks, None))
        found.append(decode(str(i), prompt[0], len(prompt), blocks))
    return found


@pytest.mark.parametrize("impl", ["generic", "fused"])
def test_tokens_are_the_same_with_graphs_and_without(tmp_path: Path, impl: str) -> None:
    llama(tmp_path)
    prompts = prompts_of(5, 40, 23)
    plain = Served(tmp_path, attention=PlainAttention)
    expected = plain.generate(prompts, 24, chunk=7)
    plain.close()
    served = Graphed(tmp_path, impl)
    run = served.device_model.run

    def with_graphs(work: object) -> object:
        with served.graphs.on(STREAM):
            result = run(work)  # type: ignore[arg-type]
        served.record()  # between jobs, as a device does that is idle
        return result

    served.device_model.run = with_graphs  # type: ignore[method-assign, assignment]
    assert served.generate(prompts, 24, chunk=7) == expected
    result = served.graphs.report()
    assert result.replays >= 20
    assert result.eager == result.graphs, "each bucket ran once without"
    served.close()


def test_a_graph_is_good_for_other_jobs_of_its_bucket(served: Graphed) -> None:
    a, b, c = prefilled(served, 9, 17, 25)
    first = served.run(a, b, c)
    served.record()
    assert served.graphs.report().graphs == 1
    # Other tokens, places, blocks and lengths, in another order, and one sequence fewer.
    jobs = [
        (decode("1", 30, 18, b.blocks), decode("0", 9, 10, a.blocks), decode("2", 3, 26, c.blocks)),
        (decode("2", 4, 27, c.blocks), decode("0", 8, 11, a.blocks), decode("1", 4, 19, b.blocks)),
    ]
    plain = Served(Path(served.host.directory), attention=PlainAttention)
    for work, prompt in zip((a, b, c), prompts_of(9, 17, 25), strict=True):
        plain.logits(SequenceWork(work.request_id, prompt, 0, work.blocks, None))
    torch.testing.assert_close(first, plain.logits(a, b, c), rtol=0, atol=1e-4)
    for job in jobs:
        expected = plain.logits(*job)
        torch.testing.assert_close(served.run(*job), expected, rtol=0, atol=1e-4)
    assert served.graphs.report().replays == 2
    plain.close()


@pytest.mark.parametrize("impl", ["generic", "fused"])
def test_a_graph_is_good_for_any_rows_of_any_adapters(
    impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = llama(tmp_path / "base", tie_word_embeddings=False)
    only = ("q_proj", "down_proj", "lm_head")
    random_adapter(reference, tmp_path / "x", 1, rank=3)
    random_adapter(reference, tmp_path / "y", 2, rank=2, only=only)
    adapters = tuple(AdapterSettings(name=n, path=str(tmp_path / n)) for n in ("x", "y"))
    plain = Served(tmp_path / "base", adapters=adapters, attention=PlainAttention)
    assert not plain.host.failed
    monkeypatch.setattr(device_adapters, "PlainLora", StaticLora)
    served = Graphed(tmp_path / "base", impl, adapters=adapters)
    for other in (plain, served):
        for i, prompt in enumerate(prompts_of(9, 17, 25)):
            other.logits(SequenceWork(str(i), prompt, 0, [2 * i, 2 * i + 1], None, [None, 0, 1][i]))
    orders: list[list[int | None]] = [[0, None, 1], [None, 1, 1], [0, 0, 0], [None, None, None]]
    for adapters_of_rows in orders:
        job = [
            replace(decode(str(i), 3 + i, 9 + 8 * i, [2 * i, 2 * i + 1]), adapter=a)
            for i, a in enumerate(adapters_of_rows)
        ]
        torch.testing.assert_close(served.run(*job), plain.logits(*job), rtol=0, atol=1e-4)
        served.record()
    result = served.graphs.report()
    assert (result.graphs, result.replays, result.eager) == (2, 2, 2), "one without adapters"
    served.graphs.close()
    served.close()
    plain.close()


def test_padding_writes_to_no_live_block(served: Graphed) -> None:
    work = prefilled(served, 9, 17, 25)
    served.run(*work)
    served.record()
    before = served.kv.copy()
    served.run(*(decode(w.request_id, 5, w.start, list(w.blocks)) for w in work))
    stride, base = served.layout.stride_bytes, -served.kv.ctypes.data % 64
    changed = {(at - base) // stride for at in (before != served.kv).nonzero()[0].tolist()}
    assert changed == {w.blocks[w.start // 16] for w in work}
    bucket = served.graphs.find("x", Bucket.decode(3, 6))
    assert bucket is None
    assert Bucket.decode(3, 6).sequences == 4, "so one row was padding"


def test_recording_reads_and_writes_nothing(served: Graphed) -> None:
    """Weights may be gone by then, and blocks another's."""
    work = prefilled(served, 9, 17)
    expected = served.run(*work)
    for array in served.weights:
        array[:] = 0xFF
    before = served.kv.copy()
    served.record()
    assert (before == served.kv).all()
    served.fill()
    torch.testing.assert_close(served.run(*work), expected)
    assert served.graphs.report().replays == 1


def test_a_job_uses_a_graph_with_room_for_more_blocks(served: Graphed) -> None:
    (a,) = prefilled(served, 9)
    model = served.device_model
    small = model._bucket([a])
    large = Bucket(small.sequences, small.tokens, small.wanted, 3000, True)
    model._bucket = lambda work: large  # type: ignore[method-assign, assignment]
    expected = served.run(a)
    served.record()
    del model._bucket  # type: ignore[method-assign]
    torch.testing.assert_close(served.run(a), expected)
    assert served.graphs.report().replays == 1
    assert not served.graphs.wanted


def prefill(name: str, tokens: list[int], blocks: list[int], start: int = 0) -> SequenceWork:
    return SequenceWork(name, tokens, start, blocks, GREEDY)


def test_a_prefill_is_replayed_for_others_of_its_bucket_and_of_up_to_half_its_rows(
    served: Graphed,
) -> None:
    """Beside decodes and alone; a chunk of a longer prompt of which no token is wanted, too."""
    long, short, tiny = prompts_of(45, 33, 20)
    (decoded,) = prefilled(served, 9)
    served.run(prefill("a", long, [5, 6, 7]), decoded)
    served.run(prefill("a", long, [5, 6, 7]))
    served.record()
    assert served.graphs.report().graphs == 2
    plain = Served(Path(served.host.directory), attention=PlainAttention)
    plain.logits(SequenceWork("0", prompts_of(9)[0], 0, decoded.blocks, None))
    first = SequenceWork("d", long[:32], 0, [9, 10, 11], None)
    jobs = [
        [prefill("b", short, [5, 6, 7]), decode("0", 7, 9, [1, 2])],
        [decode("0", 7, 9, [1, 2]), prefill("b", short, [8, 6, 7])],
        [prefill("b", short, [7, 3, 4])],
        [prefill("c", tiny, [4, 3])],  # 24 rows in a graph of 48
        [first],
        [prefill("d", long[32:], [9, 10, 11], 32), decode("0", 7, 9, [1, 2])],
    ]
    for job in jobs[:5]:
        torch.testing.assert_close(served.run(*job), plain.logits(*job), rtol=0, atol=1e-4)
    result = served.graphs.report()
    assert (result.replays, result.eager) == (5, 2)
    # What the replayed chunk wrote is read by one that runs without: 16 rows are far fewer.
    torch.testing.assert_close(served.run(*jobs[5]), plain.logits(*jobs[5]), rtol=0, atol=1e-4)
    assert served.graphs.report().eager == 3
    plain.close()


def test_the_batch_of_a_recorded_prefill_is_kept(served: Graphed) -> None:
    """Its graph has the batch's addresses: dropped for batches of other sizes, another batch of the
    bucket would be filled, and the graph would run the last job of the old one."""
    long, other = prompts_of(45, 41)
    served.run(prefill("a", long, [5, 6, 7]))
    served.record()
    model = served.device_model
    for n in range(60, 300, 16):
        model.batch([SequenceWork("x", [1] * n, 0, list(range(20)), None)])
    plain = Served(Path(served.host.directory), attention=PlainAttention)
    job = prefill("b", other, [5, 6, 7])
    torch.testing.assert_close(served.run(job), plain.logits(job), rtol=0, atol=1e-4)
    assert served.graphs.report().replays == 1
    plain.close()


def test_large_prefills_and_those_that_wait_for_layers_have_none(
    served: Graphed, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prefill("a", prompts_of(45)[0], [5, 6, 7])
    result = served.model.barriers
    served.model.barriers = RecordedBarriers([1])
    served.run(job)
    served.model.barriers = result
    monkeypatch.setattr(executor, "PREFILL_BYTES", 1000)
    served.run(job)
    assert not served.graphs.wanted
    monkeypatch.undo()
    served.run(job)
    assert served.graphs.wanted


def test_what_reads_its_plan_on_the_host_has_none(tmp_path: Path) -> None:
    llama(tmp_path)
    served = Graphed(tmp_path)
    served.device_model._make = PlainAttention
    served.run(prefill("a", [1, 2, 3], [1]))
    served.run(decode("a", 4, 3, [1]))
    assert not served.graphs.wanted
    served.close()


# -- the cache ------------------------------------------------------------------------------------


def filled(tensor: Tensor) -> object:
    def step(recording: Recording) -> Tensor:
        return tensor.add(1)

    return step


def cache(n: int, each: int = 1 << 20) -> tuple[GraphCache, Recorders]:
    """Room for `n` graphs."""
    recorders = Recorders(graph_bytes=each)
    return GraphCache(n * (each + PIECE_BYTES), recorders), recorders


def add(graphs: GraphCache, model: str, bucket: Bucket, stream: int = 1) -> None:
    with graphs.on(stream):
        assert graphs.find(model, bucket) is None
        graphs.want(model, bucket, filled(torch.ones(3)))  # type: ignore[arg-type]
    graphs.record_one()


def there(graphs: GraphCache, model: str, bucket: Bucket, stream: int = 1) -> bool:
    with graphs.on(stream):
        return graphs.find(model, bucket) is not None


ONE, TWO, FOUR = (Bucket.decode(n, 8) for n in (1, 2, 4))


def test_a_stream_without_room_frees_all_its_graphs_and_records_the_new_one() -> None:
    graphs, recorders = cache(2)
    add(graphs, "a", ONE)
    add(graphs, "b", ONE)
    add(graphs, "a", TWO)
    assert not recorders.graphs
    assert graphs.report().dropped == 3
    assert graphs.due(100), "the last is to be recorded again at once, which now has room"
    graphs.record_one()
    assert there(graphs, "a", TWO)
    assert not there(graphs, "a", ONE)
    assert not there(graphs, "b", ONE)
    assert 0 < graphs.n_bytes <= graphs.cap_bytes
    graphs.close()
    assert not recorders.graphs


def test_the_stream_used_least_recently_is_freed_first() -> None:
    graphs, recorders = cache(2)
    add(graphs, "a", ONE, stream=1)
    add(graphs, "b", ONE, stream=2)
    assert there(graphs, "a", ONE, stream=1)
    add(graphs, "a", TWO, stream=1)
    assert there(graphs, "a", ONE, stream=1)
    assert there(graphs, "a", TWO, stream=1)
    assert not there(graphs, "b", ONE, stream=2)
    assert not recorders.made[2].graphs
    assert graphs.n_bytes <= graphs.cap_bytes
    graphs.close()


def test_one_that_does_not_fit_is_not_tried_again() -> None:
    graphs, _ = cache(1)
    graphs.cap_bytes -= 1
    add(graphs, "a", ONE)
    assert not there(graphs, "a", ONE)
    assert graphs.n_bytes == 0
    with graphs.on(1):
        graphs.want("a", ONE, filled(torch.ones(3)))  # type: ignore[arg-type]
    assert not graphs.wanted


def test_where_no_recorder_can_be_made_it_is_not_tried_for_ever() -> None:
    def fails(stream: int) -> GraphRecorder:
        raise DeviceError("cuStreamCreate", "CUDA_ERROR_OUT_OF_MEMORY")

    graphs = GraphCache(1 << 20, fails)
    add(graphs, "a", ONE)
    assert not there(graphs, "a", ONE)
    with graphs.on(1):
        graphs.want("a", ONE, filled(torch.ones(3)))  # type: ignore[arg-type]
    assert not graphs.wanted


CHUNK = Bucket.holding([40], 1, 8)


def test_prefills_take_only_what_decodes_have_left_of_half_the_memory() -> None:
    graphs, _ = cache(4)
    add(graphs, "a", CHUNK)
    add(graphs, "a", ONE)
    assert graphs.n_bytes <= graphs.cap_bytes // 2
    add(graphs, "b", CHUNK)
    with graphs.on(1):
        graphs.want("c", CHUNK, filled(torch.ones(3)))  # type: ignore[arg-type]
    assert not graphs.wanted
    add(graphs, "a", TWO)
    assert graphs.report().graphs == 4
    assert not graphs.report().dropped


def test_a_prefill_that_has_no_room_after_all_costs_decodes_their_graphs_once() -> None:
    graphs, recorders = cache(2)
    add(graphs, "a", ONE)
    recorders.made[1].session_bytes *= 4
    add(graphs, "a", CHUNK)
    assert graphs.report().dropped == 2
    assert not graphs.wanted
    recorders.made[1].session_bytes //= 4
    add(graphs, "a", ONE)
    add(graphs, "a", CHUNK)
    assert there(graphs, "a", ONE)
    assert not there(graphs, "a", CHUNK)
    assert graphs.report().dropped == 2


def test_prefills_that_cannot_be_recorded_leave_decodes_theirs() -> None:
    graphs, _ = cache(9)

    def looks(recording: Recording) -> Tensor:
        return torch.ones(2) * torch.ones(1).item()

    with graphs.on(1):
        graphs.want("a", CHUNK, looks)
    graphs.record_one()
    with graphs.on(1):
        graphs.want("a", Bucket.holding([90], 1, 8), looks)
    assert not graphs.wanted
    add(graphs, "a", ONE)
    assert there(graphs, "a", ONE)
    graphs.forget("a")
    with graphs.on(1):
        graphs.want("a", CHUNK, looks)
    assert graphs.wanted, "another model of that name"


def test_which_jobs_a_recorded_prefill_runs() -> None:
    graphs, _ = cache(9)
    add(graphs, "a", Bucket.holding([60, 1], 2, 8))
    add(graphs, "a", Bucket.holding([90, 1], 2, 1500))
    for sizes, blocks, rows in (([50, 1], 8, 64), ([50, 1], 1500, 96), ([70, 1], 8, 96)):
        with graphs.on(1):
            found = graphs.find("a", Bucket.holding(sizes, 1, blocks))
        assert found is not None
        assert found.bucket.tokens == rows, "of those with room the one with least padding"
    for other in (
        Bucket.holding([20, 1], 2, 8),  # under half the rows of either
        Bucket.holding([120, 1], 2, 8),
        Bucket.holding([90], 1, 8),
        Bucket.holding([30, 30, 30], 2, 8),
        Bucket.holding([90, 1], 2, 1600),
        Bucket.holding([90, 1], 2, 8, adapters=1),
        Bucket.decode(2, 8),
    ):
        assert not there(graphs, "a", other), other


def test_streams_have_graphs_of_their_own() -> None:
    graphs, recorders = cache(9)
    add(graphs, "a", ONE, stream=1)
    assert not there(graphs, "a", ONE, stream=2)
    add(graphs, "a", ONE, stream=2)
    assert set(recorders.made) == {1, 2}
    assert graphs.find("a", ONE) is None, "this thread runs no job"


def test_what_cannot_be_recorded_runs_without() -> None:
    graphs, recorders = cache(9)

    def looks(recording: Recording) -> Tensor:
        return torch.ones(2) * torch.ones(1).item()

    with graphs.on(1):
        graphs.want("a", ONE, looks)
    graphs.record_one()
    assert not there(graphs, "a", ONE)
    assert not recorders.graphs
    with graphs.on(1):
        graphs.want("a", TWO, looks)
    assert not graphs.wanted
    add(graphs, "b", ONE)
    assert there(graphs, "b", ONE), "the recorder is as good as before"
    graphs.forget("a")
    with graphs.on(1):
        graphs.want("a", TWO, looks)
    assert graphs.wanted, "another model of that name"


def test_a_model_that_goes_leaves_the_graphs_of_others_good() -> None:
    """PyTorch frees a stream's cuBLAS workspaces with any one of its graphs."""
    graphs, recorders = cache(9)
    add(graphs, "a", ONE)
    add(graphs, "b", FOUR)
    graphs.forget("a")
    assert not there(graphs, "a", ONE)
    with graphs.on(1):
        found = graphs.find("b", FOUR)
        assert found is not None
        assert found.replay(None).tolist() == [2, 2, 2]
    graphs.forget("b")
    assert not recorders.graphs, "freed with the last that was used"
    assert graphs.n_bytes == 0
    assert graphs.report().dropped == 2


def test_a_recording_that_breaks_off_leaves_the_graphs_of_its_stream_good() -> None:
    graphs, recorders = cache(9)
    add(graphs, "a", ONE)

    def fails(recording: Recording) -> Tensor:
        torch.ones(2) + 1
        recording.wait(1)
        raise RuntimeError("it cannot be recorded")

    with graphs.on(1):
        graphs.want("b", ONE, fails, (1,))
        graphs.find("a", ONE)
    graphs.record_one()
    assert there(graphs, "a", ONE)
    assert len(recorders.graphs) == 3, "both pieces of the other are kept until all are freed"
    assert graphs.n_bytes >= 3 * PIECE_BYTES
    with graphs.on(1):
        found = graphs.find("a", ONE)
        assert found is not None
        assert found.replay(None).tolist() == [2, 2, 2]
    graphs.close()
    assert not recorders.graphs


def test_nothing_is_recorded_beside_a_job() -> None:
    graphs, recorders = cache(9)
    with graphs.on(1):
        graphs.want("a", ONE, filled(torch.ones(3)))  # type: ignore[arg-type]
        with pytest.raises(BrokenPromise, match="beside a job"):
            graphs.record_one()
    assert graphs.wanted
    assert not recorders.made


def test_the_stand_in_refuses_what_is_wrong() -> None:
    recorder = FakeRecorder()
    with pytest.raises(Misuse, match="outside"):
        recorder.begin()
    with recorder.session():
        recorder.begin()
        made = torch.ones(2) + 1
        graph = recorder.end()
        assert made.isnan().all(), "nothing has run"
        graph.replay()
        assert made.tolist() == [2, 2]
        recorder.begin()
        with pytest.raises(Misuse, match="nothing"):
            recorder.end()
    recorder.clear()
    with pytest.raises(Misuse, match="freed"):
        graph.replay()


# -- pieces ---------------------------------------------------------------------------------------


class RecordedBarriers:
    """Implements `Barriers`."""

    def __init__(self, cuts: list[int]) -> None:
        self.cuts = cuts
        self.recorded: list[str] = []

    def places(self, work: object) -> None:
        return None

    def begin_pass(self, work: Sequence[SequenceWork]) -> list[int]:
        return self.cuts

    def wait(self, layer: int) -> None:
        self.recorded.append(f"wait {layer}")

    def used(self, layer: int) -> None:
        self.recorded.append(f"used {layer}")

    def stalled(self) -> float:
        return 0.0


@pytest.mark.parametrize(("cuts", "pieces"), [([0, 2], 5), ([0, 1], 4), ([1], 3), ([0, 1, 2], 5)])
def test_a_pass_is_cut_where_it_waits_for_layers(
    served: Graphed, cuts: list[int], pieces: int
) -> None:
    work = prefilled(served, 9, 17)
    expected = served.run(*work)
    result = served.model.barriers = RecordedBarriers(cuts)
    served.run(*work)
    eager, result.recorded = result.recorded, []
    served.record()
    assert not result.recorded, "recording loads no layers"
    torch.testing.assert_close(served.run(*work), expected)
    assert result.recorded == eager
    assert eager == [what for i in cuts for what in (f"wait {i}", f"used {i}")]
    assert {len(r.recording.pieces) for r in served.graphs._kept.values()} == {1, pieces}
    result.cuts = []
    torch.testing.assert_close(served.run(*work), expected)
    assert served.graphs.report().replays == 2
