"""Products by measurement: the choice, and on a GPU that every proposal of cuBLASLt multiplies."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from pd_cluster.models.linear import Linear
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder, GraphTimer
from pd_kernels import cublas_lt
from pd_kernels.backends import TORCH
from pd_kernels.cublas_lt import CublasLt
from pd_kernels.gemm_selection import (
    MANY_ROWS,
    PARTS,
    ROUNDS,
    Activated,
    From,
    choose_product,
    usual_product,
    winner_from,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_kernels.gemm_selection import Product


class Timed:
    """A product that pretends to take `time`, by `clock`."""

    def __init__(self, time: float, clock: list[float]) -> None:
        self._time = time
        self._clock = clock

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self._clock.append(self._time)
        return F.linear(x, weight)


def choose(usual: float, times: Sequence[float]) -> tuple[Product | None, list[Timed]]:
    clock: list[float] = []
    products = [Timed(time, clock) for time in times]

    def measure(run: Callable[[], None]) -> float:
        clock.clear()
        run()
        return sum(clock) or usual

    weights = [torch.zeros(4, 3)]
    return choose_product(2, weights, lambda num_rows, weight, parts=1: products, measure), products


def test_the_fastest_is_chosen() -> None:
    chosen, products = choose(10.0, (9.0, 7.0, 8.0))
    assert chosen is products[1]


@pytest.mark.parametrize("times", [(), (10.0, 12.0), (9.9,)])
def test_torch_stays_unless_another_is_faster_by_more_than_noise(times: tuple[float, ...]) -> None:
    assert choose(10.0, times)[0] is None


def test_a_way_that_does_not_run_is_none() -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("cublasLtMatmul: status 15")

    def fast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + 0

    def measure(run: Callable[[], None]) -> float:
        run()
        return next(times)

    times = iter((10.0, 5.0))
    assert choose_product(2, [torch.zeros(4, 3)], lambda num_rows, weight, parts=1: [broken, fast], measure) is fast


def test_a_wrong_product_is_not_taken_however_fast() -> None:
    """The operands have a fixed seed: a right product within the tolerance of 0 would hide the fault."""
    torch.manual_seed(0)

    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, weight)
        product[-1] = torch.nan if x.shape[1] == 3 else 0.0
        return product

    def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.linear(x, weight) / 2] * 2)

    def measure(run: Callable[[], None]) -> float:
        run()
        return next(times)

    for num_inputs in (3, 8):
        weights = [torch.ones(4, num_inputs)]
        for ways in ([wrong, halves], [wrong]):
            times = iter((10.0, 5.0, 5.1))
            chosen = choose_product(2, weights, lambda num_rows, weight, parts=1, ways=ways: ways, measure)
            assert chosen is (halves if len(ways) > 1 else None)


def test_a_shape_without_proposals_is_left_to_torch() -> None:
    def refuse(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
        raise RuntimeError("cublasLtMatmulAlgoGetHeuristic: status 15")

    assert choose_product(2, [torch.zeros(4, 3)], refuse, lambda run: 1.0) is None


def test_parts_are_proposed_where_a_kernel_sums_them() -> None:
    """And where rows are few: of many, the outputs are enough tiles."""
    asked: list[tuple[int, int]] = []

    def propose(num_rows: int, weight: torch.Tensor, parts: int = 1) -> list[Product]:
        asked.append((num_rows, parts))
        return [halves] if parts == PARTS else []

    def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        clock.append(5.0)
        return torch.stack([F.linear(x, weight) / 2] * 2)

    def measure(run: Callable[[], None]) -> float:
        clock[:] = [9.0]
        run()
        return clock[-1]

    clock: list[float] = []
    sums: list[torch.Size] = []
    weights = [torch.zeros(4, 3)]
    assert choose_product(2, weights, propose, measure) is None
    assert choose_product(2, weights, propose, measure, lambda done: sums.append(done.shape)) is halves
    assert choose_product(MANY_ROWS, weights, propose, measure, lambda done: None) is None
    assert asked == [(2, 1), (2, 1), (2, PARTS), (MANY_ROWS, 1)]
    assert sums == [(2, 4), (2, 2, 4)]


def test_many_rows_are_multiplied_in_turn() -> None:
    """A first measurement on a cool device says little; what is far behind in it is not measured again."""
    times = {"usual": iter([5.0, 9.0, 9.0, 9.0, 9.0]), "even": iter([5.1, 8.0, 8.0, 8.0, 8.0]), "slow": iter([7.0])}
    order: list[str] = []

    def way(name: str) -> Product:
        def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            order.append(name)
            return F.linear(x, weight)

        return multiply

    def measure(run: Callable[[], None]) -> float:
        before = len(order)
        run()
        return next(times[order[-1] if len(order) > before else "usual"])

    even = way("even")
    ways = [way("slow"), even]
    assert choose_product(MANY_ROWS, [torch.zeros(4, 3)], lambda num_rows, weight, parts=1: ways, measure) is even
    assert order == ["slow"] + ["even"] * (1 + ROUNDS) + ["even"], "and once more for its result"


def test_a_linear_uses_what_was_chosen_for_its_number_of_rows() -> None:
    linear = Linear(torch.randn(4, 3), None, TORCH)
    linear.use({2: lambda x, weight: F.linear(x, weight) + 1})
    two, three = torch.randn(2, 3), torch.randn(3, 3)
    assert torch.equal(linear(two), F.linear(two, linear.weight) + 1)
    assert torch.equal(linear(three), F.linear(three, linear.weight))


def test_a_linear_multiplies_many_rows_like_the_winner_and_activates_all() -> None:
    def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).relu() + 1

    linear = Linear(torch.randn(4, 3), None, TORCH, torch.relu)
    linear.use({2: Activated(usual_product, torch.relu)}, From(4, gated))
    for num_rows, more in ((2, 0), (3, 0), (4, 1), (5, 1)):
        x = torch.randn(num_rows, 3)
        assert torch.equal(linear(x), F.linear(x, linear.weight).relu() + more)


@pytest.mark.parametrize(
    ("winners", "least"),
    [("oogg", 26), ("oggg", 16), ("gogg", 26), ("gggo", None), ("gggn", None), ("gggh", 36), ("gggg", 10), ("", None)],
)
def test_what_won_at_the_most_rows_is_used_for_those_between(winners: str, least: int | None) -> None:
    """`g` and `h`: products for any number of rows; `o`: for one number; `n`: torch's own."""
    products: dict[str, Product | None] = {name: Timed(1.0, []) for name in "gho"} | {"n": None}
    found = {10 * (place + 1): products[name] for place, name in enumerate(winners)}
    winner = winner_from(found, [product for name in "gh" if (product := products[name]) is not None])
    assert winner == (None if least is None else From(least, products[winners[-1]]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("time", "taken"), [(9.0, True), (10.25, True), (10.4, False)])
def test_of_many_rows_the_favoured_is_taken_though_it_is_only_as_fast(time: float, taken: bool) -> None:
    clock: list[float] = []
    favoured, other, usual = Timed(time, clock), Timed(9.8, clock), Timed(10.0, clock)

    def measure(run: Callable[[], None]) -> float:
        clock.clear()
        run()
        return sum(clock)

    ways = [other, favoured]
    for num_rows, expected in (
        (MANY_ROWS, favoured if taken else other),
        (MANY_ROWS - 1, favoured if time < 9.8 else other),
    ):
        chosen = choose_product(
            num_rows, [torch.zeros(4, 3)], lambda num_rows, weight, parts=1: ways, measure, usual=usual,
            favoured=[favoured],
        )  # fmt: skip
        assert chosen is expected


def test_nothing_is_proposed_for_float32() -> None:
    """Without a look at any library: none is loaded here."""
    assert CublasLt.__new__(CublasLt).propose(2, torch.zeros(4, 3)) == []


def test_a_product_is_handed_over_whole() -> None:
    """Addresses of more than 32 bits among the 16 arguments, and a status that is looked at."""
    heard: list[list[int]] = []
    values: list[object] = []
    status = 0

    def matmul(*arguments: int) -> int:
        heard.append([*arguments])
        one, zero = (ctypes.c_float.from_address(arguments[place]).value for place in (2, 7))
        values[:] = [one, zero, *(ctypes.c_uint64 * 8).from_address(arguments[12])]
        return status

    far = 1 << 40
    library = CublasLt.__new__(CublasLt)
    library._handle, library._workspace = ctypes.c_void_p(far), torch.empty(64)
    shape = cublas_lt._Shape(*(ctypes.c_void_p(far + place) for place in range(1, 5)))
    proposal = cublas_lt._Proposal((ctypes.c_uint64 * 8)(*range(8)), workspace_bytes=48)
    launch = library._launcher(
        shape, proposal, ctypes.CFUNCTYPE(ctypes.c_int, *cublas_lt._MATMUL)(matmul), lambda device: far + 9
    )
    del proposal
    launch(far + 5, far + 6, far + 7)
    places = [0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15]
    assert [heard[0][place] - far for place in places[:10]] == [0, 1, 6, 2, 5, 3, 7, 4, 7, 4]
    assert [heard[0][place] for place in places[10:]] == [library._workspace.data_ptr(), 48, far + 9]
    assert values == [1.0, 0.0, *range(8)]
    status = 15
    with pytest.raises(RuntimeError, match="cublasLtMatmul: status 15"):
        launch(0, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 40, 224, 1024])
def test_every_proposal_multiplies(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    weight = torch.randn(1536, 1024, generator=generator, device="cuda", dtype=dtype)
    x = torch.randn(num_rows, 1024, generator=generator, device="cuda", dtype=dtype)
    wanted = x.double() @ weight.double().t()
    library = CublasLt(weight.device)
    try:
        proposals = library.propose(num_rows, weight)
        assert proposals
        assert not library.propose(num_rows, weight.float())
        for proposal in proposals:  # 1024 products of about 1, rounded once: half a unit of the largest
            torch.testing.assert_close(proposal(x, weight).double(), wanted, rtol=1e-2, atol=0.1)
        for proposal in library.propose(num_rows, weight, PARTS):
            found = proposal(x, weight)
            assert found.shape == (PARTS, num_rows, 1536)
            torch.testing.assert_close(found.double().sum(0), wanted, rtol=1e-4, atol=1e-3)

        def run() -> None:
            proposals[0](x, weight)

        timer = GraphTimer(CudaRecorder(weight.device))
        assert timer(run) > 0
        reserved = torch.cuda.memory_reserved()
        for _ in range(50):
            timer(run)
        assert torch.cuda.memory_reserved() == reserved
    finally:
        library.close()
