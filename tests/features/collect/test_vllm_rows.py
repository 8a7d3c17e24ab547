"""Rows of engine steps joined to windows, and the live weights' checksum; no engine needed."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from features.collect.sampling import WindowSpan  # noqa: E402
from features.collect.taps.vllm_rows import ReplayRequest, RowStore, StepPlanner  # noqa: E402
from features.collect.taps.vllm_weights import FinalNorm, weights_checksum  # noqa: E402
from features.errors import EngineError  # noqa: E402

BLOCK, LAYERS, HIDDEN, GROUP = 4, 2, 3, 1
SPANS = (WindowSpan(1, 3), WindowSpan(6, 11))
REQUEST = ReplayRequest("t", 12, SPANS)


def step(*, new: Any = (), cached: Any = (), scheduled: dict[str, int], finished: Any = ()) -> Any:
    """A scheduler output: ``new`` (id, request, blocks, computed), ``cached`` (id, blocks, computed, resumed)."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name, block_ids=([99], blocks), num_computed_tokens=computed,
                sampling_params=SimpleNamespace(
                    extra_args=request and {"kv_transfer_params": request.as_parameter()}
                ),
            )
            for name, request, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            resumed_req_ids={name for name, _, _, resumed in cached if resumed},
            new_block_ids=[blocks and ([98], blocks) for _, blocks, _, _ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
        ),
        num_scheduled_tokens=scheduled,
    )  # fmt: skip


class Engine:
    """A state cache whose row of (sequence, position) can be told from every other."""

    def __init__(self) -> None:
        self.cache = torch.full((20 * BLOCK, LAYERS, HIDDEN), -1.0)
        self.planner = StepPlanner(group=GROUP, block_size=BLOCK)
        self.store = RowStore(lambda cache, slots: cache[slots], self.spoil)
        self.tables: dict[str, list[int]] = {}

    def spoil(self, cache: Any, slots: Any) -> None:
        cache[slots] = torch.nan

    def run(self, output: Any, computes: dict[str, tuple[int, int]]) -> None:
        """One step that stores the states of ``computes`` (half-open ranges by request id)."""
        shares = self.planner.shares(output)
        self.store.mark(self.cache, shares)
        for name, (start, stop) in computes.items():
            for position in range(start, stop):
                slot = self.tables[name][position // BLOCK] * BLOCK + position % BLOCK
                self.cache[slot] = position
        self.store.take(self.cache, shares)


def positions_of(rows: Any) -> list[int]:
    assert bool((rows == rows[:, :1, :1]).all())
    return [int(value) for value in rows[:, 0, 0]]


PLANNED = [1, 2, 6, 7, 8, 9, 10]


def test_chunks_are_joined_in_order_and_only_planned_rows_are_taken() -> None:
    engine = Engine()
    engine.tables["r"] = [7, 3, 12]
    engine.run(step(new=[("r", REQUEST, [7, 3], 0)], scheduled={"r": 7}), {"r": (0, 7)})
    # The sampled token is scheduled too: position 12 is not the sequence's.
    engine.run(step(cached=[("r", [12], 7, False)], scheduled={"r": 6}), {"r": (7, 12)})
    rows, fault = engine.store.fetch("t")
    assert (positions_of(rows), fault) == (PLANNED, "")
    assert rows.shape == (7, LAYERS, HIDDEN)
    assert engine.store.fetch("t") == (None, "the engine never ran this sequence")


def test_a_request_without_a_plan_is_left_alone() -> None:
    engine = Engine()
    engine.tables["other"] = [1]
    engine.run(step(new=[("other", None, [1], 0)], scheduled={"other": 4}), {"other": (0, 4)})
    engine.run(step(cached=[("other", None, 4, False)], scheduled={"other": 1}), {})
    assert not torch.isnan(engine.cache).any()


@pytest.mark.parametrize(
    "plan",
    [
        7,
        {},
        {"ticket": "t", "num_tokens": 12, "spans": [[1]]},
        {"ticket": "t", "num_tokens": 3, "spans": [[1, 4]]},
    ],
)
def test_a_plan_that_makes_no_sense_does_not_end_the_engine(plan: Any) -> None:
    assert ReplayRequest.from_parameter({"draftlake": plan}) is None


def test_a_preempted_sequence_is_taken_from_its_second_run() -> None:
    engine = Engine()
    engine.tables["r"] = [7, 3]
    engine.run(step(new=[("r", REQUEST, [7, 3], 0)], scheduled={"r": 7}), {"r": (0, 7)})
    engine.tables["r"] = [15, 16, 17]
    engine.run(step(cached=[("r", [15, 16, 17], 0, True)], scheduled={"r": 12}), {"r": (0, 12)})
    rows, _ = engine.store.fetch("t")
    assert positions_of(rows) == PLANNED


def test_a_cached_prefix_is_refused_even_outside_the_planned_rows() -> None:
    engine = Engine()
    engine.tables["r"] = [7, 3, 12]
    request = ReplayRequest("t", 12, (WindowSpan(6, 11),))
    engine.run(step(new=[("r", request, [7, 3, 12], 4)], scheduled={"r": 8}), {"r": (4, 12)})
    rows, fault = engine.store.fetch("t")
    assert rows is None
    assert "expected states of positions [0, 12), the engine computed [4, 12)" in fault


def test_an_aborted_sequence_is_refused() -> None:
    engine = Engine()
    engine.tables["r"] = [7, 3, 12]
    engine.run(step(new=[("r", REQUEST, [7, 3], 0)], scheduled={"r": 7}), {"r": (0, 7)})
    engine.run(step(finished=["r"], scheduled={}), {})
    rows, fault = engine.store.fetch("t")
    assert rows is None
    assert "the engine computed [0, 7)" in fault


def test_rows_of_an_earlier_sequence_in_the_same_blocks_are_never_taken() -> None:
    engine = Engine()
    engine.cache[:] = 5.0
    engine.tables["r"] = [7, 3, 12]
    engine.run(step(new=[("r", REQUEST, [7, 3, 12], 0)], scheduled={"r": 12}), {"r": (0, 9)})
    rows, fault = engine.store.fetch("t")
    assert rows is None
    assert fault.startswith("2 of 7 planned rows were computed but their states never stored")


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(torch.bfloat16)


def test_the_checksum_sees_one_bit_anywhere_and_nothing_else() -> None:
    model = a_model()
    before = weights_checksum(model)
    assert weights_checksum(a_model()) == before
    seen = {before}
    for parameter in model.parameters():
        flat = parameter.data.view(torch.int16).view(-1)
        for index in range(len(flat)):
            flat[index] ^= 1
            seen.add(weights_checksum(model))
            flat[index] ^= 1
    assert len(seen) == 1 + sum(p.numel() for p in model.parameters())
    flat = model[0].weight.data.view(-1)
    flat[[0, 1]] = flat[[1, 0]]
    assert weights_checksum(model) != before


def test_packed_weights_cannot_be_checked_and_are_refused() -> None:
    model = a_model()
    model[0].weight = nn.Parameter(torch.empty(0))
    with pytest.raises(EngineError, match="0.weight of the engine's target is empty"):
        weights_checksum(model)


class RMSNorm(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight), 1e-5


class GemmaRMSNorm(RMSNorm):
    pass


class Target(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm = norm


@pytest.mark.parametrize(("kind", "offset"), [(RMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_the_final_norm_is_that_of_transformers(kind: type[RMSNorm], offset: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    weight, rows = torch.rand(8) - 0.5, torch.randn(5, 8) * 3
    reference = LlamaRMSNorm(8, eps=1e-5)
    reference.weight.data = weight + offset
    found = FinalNorm.of(Target(kind(weight)))(rows)
    assert torch.allclose(found, reference(rows), atol=1e-6)


def test_another_norm_is_refused() -> None:
    with pytest.raises(EngineError, match="found LayerNorm"):
        FinalNorm.of(Target(nn.LayerNorm(8)))
