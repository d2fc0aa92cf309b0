"""Sizes of launches are those that Triton's own functions give."""

from __future__ import annotations

import pytest

from pd_kernels.launch_sizes import cdiv, next_power_of_2

triton = pytest.importorskip("triton", reason="needs the functions to compare with")


def test_sizes_are_tritons() -> None:
    counts = [*range(1, 70), 127, 128, 129, 4095, 4096, 4097, 128_256]
    assert [next_power_of_2(count) for count in counts] == [triton.next_power_of_2(count) for count in counts]
    assert next_power_of_2(0) == 1
    for size in (1, 3, 16, 128):
        assert [cdiv(count, size) for count in counts] == [triton.cdiv(count, size) for count in counts]
    assert cdiv(0, 16) == 0
