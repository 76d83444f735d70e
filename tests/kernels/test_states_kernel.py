"""Ops on per-sequence states: C++ against torch's plain recurrence, and the bits of every way to cut a sequence up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvern_kernels import cpu, reference

HEADS, GROUPS = 6, 3


class Conv:
    """``arguments(tokens)`` are the op's tensors of [T, …] for these tokens; ``weights`` follow or precede the states."""

    state_shape: tuple[int, ...] = (3, 300)

    def __init__(self, total: int) -> None:
        # A slice of wider rows, as projections give it.
        self.x = torch.randn(total, 333)[:, 7:307]
        self.weight, self.bias = torch.randn(4, 300), torch.randn(300)

    def run(self, ops: Any, at: Tensor | slice, states: Tensor, *where: Tensor) -> Tensor:
        return ops.causal_conv(self.x[at], self.weight, self.bias, states, *where)


class Scan:
    state_shape = (HEADS, 5, 21)

    def __init__(self, total: int) -> None:
        self.x, self.dt = torch.randn(total, HEADS, 5), torch.randn(total, HEADS)
        self.b, self.c = torch.randn(2, total, GROUPS, 21)
        self.a, self.d, self.bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)

    def run(self, ops: Any, at: Tensor | slice, states: Tensor, *where: Tensor) -> Tensor:
        tokens = (self.x[at], self.dt[at], self.b[at], self.c[at])
        return ops.mamba_scan(*tokens, self.a, self.d, self.bias, (0.1, 2.0), states, *where)


class Delta:
    state_shape = (HEADS, 19, 13)

    def __init__(self, total: int) -> None:
        self.q, self.k = torch.randn(2, total, GROUPS, 19)
        self.v, self.a, self.b = (torch.randn(total, HEADS, 13), *torch.randn(2, total, HEADS))
        self.rate, self.bias = -torch.rand(HEADS), torch.randn(HEADS)

    def run(self, ops: Any, at: Tensor | slice, states: Tensor, *where: Tensor) -> Tensor:
        tokens = (self.q[at], self.k[at], self.v[at], self.a[at], self.b[at])
        return ops.gated_delta_scan(*tokens, self.rate, self.bias, states, *where)


def where(lengths: list[int], rows: list[int], fresh: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    start = torch.tensor([0, *lengths]).cumsum(0).int()
    return start, torch.tensor(rows, dtype=torch.int64), torch.tensor(fresh)


@pytest.mark.parametrize("kind", [Conv, Scan, Delta])
def test_cpp_does_what_the_plain_recurrence_does(kind: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    # One that starts, one that goes on, one that decodes, one whose state is kept nowhere, one without tokens.
    step = where([9, 2, 1, 5, 0], [4, 0, 2, -1, 3], [True, False, False, True, False])
    case = kind(17)
    expected = torch.randn(6, *case.state_shape)
    expected[4] = float("nan")  # what a sequence before it left there
    found = expected.clone()
    outputs = [case.run(ops, slice(None), s, *step) for ops, s in ((reference, expected), (cpu, found))]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[[1, 3, 5]], expected[[1, 3, 5]]), "rows that no sequence names change"


@pytest.mark.parametrize("kind", [Conv, Scan, Delta])
def test_bits_do_not_depend_on_steps_or_neighbours(kind: Callable[[int], Any]) -> None:
    torch.manual_seed(1)
    case = kind(23)
    whole = torch.zeros(2, *case.state_shape)
    expected = case.run(cpu, slice(0, 20), whole, *where([20], [1], [True]))
    cut = torch.full((3, *case.state_shape), 7.0)
    outputs = []
    for first, last in ((0, 8), (8, 9), (9, 10), (10, 19), (19, 20)):
        # The other sequence's three tokens come first.
        at = torch.tensor([20, 21, 22, *range(first, last)])
        step = where([3, last - first], [0, 2], [True, first == 0])
        outputs.append(case.run(cpu, at, cut, *step)[3:])
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(cut[2], whole[1])


def test_a_row_out_of_range_is_refused() -> None:
    case = Scan(1)
    with pytest.raises(ValueError, match="row 2 of 2"):
        case.run(cpu, slice(None), torch.zeros(2, *case.state_shape), *where([1], [2], [True]))
