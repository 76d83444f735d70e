"""Fixtures: every C++ variant that this processor runs, one after the other."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvern_kernels import cpu, library

VARIANTS = library.variants(cpu.LIBRARY)
OWN_OPS = [
    name for name in VARIANTS if name not in ("avx512_vnni", "avx512_bf16", "avx512_amx")
]  # those differ in linear layers and attention only


@pytest.fixture(params=VARIANTS)
def linear_variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the variant that serves `cpu` during the test."""
    library.use_variant(cpu.LIBRARY, request.param)
    yield request.param
    library.use_variant(cpu.LIBRARY, VARIANTS[-1])


@pytest.fixture(params=OWN_OPS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Likewise, without the variants whose ops beside linear are another's."""
    library.use_variant(cpu.LIBRARY, request.param)
    yield request.param
    library.use_variant(cpu.LIBRARY, VARIANTS[-1])


@pytest.fixture
def every_linear() -> Callable[[Callable[[], Any]], dict[str, Any]]:
    """Calls a function under each variant: name → what it returned."""

    def call(function: Callable[[], Any]) -> dict[str, Any]:
        results = {}
        for name in VARIANTS:
            library.use_variant(cpu.LIBRARY, name)
            results[name] = function()
        return results

    return call


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)
