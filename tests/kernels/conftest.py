"""Fixtures: every C++ variant that this processor runs, one after the other."""

from collections.abc import Iterator

import pytest
import torch

from kvern_kernels import cpu, library

VARIANTS = library.variants(cpu._library)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the variant that serves `cpu` during the test."""
    library.use_variant(cpu._library, request.param)
    yield request.param
    library.use_variant(cpu._library, VARIANTS[-1])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)
