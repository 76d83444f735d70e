"""Attention by name: who serves, who can't and why, and torch's own attention behind the op."""

import logging
from collections.abc import Iterator

import pytest
import torch

import kvern_kernels
from kvern_kernels import attention_backends, cpu, decoder, dispatch, reference
from kvern_kernels.attention_options import AttentionOptions


@pytest.fixture(autouse=True)
def _choose_again_afterwards() -> Iterator[None]:
    yield
    dispatch.select_attention(None, "cpu")


def test_a_backend_is_found_by_name_in_any_case(caplog: pytest.LogCaptureFixture) -> None:
    dispatch.select_attention("torch_sdpa", "cpu")
    with caplog.at_level(logging.INFO, logger="kvern.kernels"):
        assert kvern_kernels.paged_attention is attention_backends.sdpa_attention
    assert "paged_attention on cpu: TORCH_SDPA, which was asked for" in caplog.text
    assert kvern_kernels.pack_decoder is reference.pack_decoder  # not the stack with its own attention
    assert kvern_kernels.run_decoder is decoder.run_by_op
    dispatch.select_attention("CPU_ATTN", "cpu")
    assert kvern_kernels.run_decoder is cpu.run_decoder
    assert kvern_kernels.paged_attention is cpu.paged_attention
    dispatch.select_attention(None, "cpu")
    assert kvern_kernels.paged_attention is cpu.paged_attention


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FlashInfer", "XFORMERS"])
def test_one_that_cannot_serve_is_refused_with_every_reason(name: str) -> None:
    with pytest.raises(dispatch.Unavailable) as refused:
        dispatch.select_attention(name, "cpu")
    told = str(refused.value)
    assert told.startswith(
        f"attention backend {name!r} {'is unknown' if name == 'XFORMERS' else 'cannot serve here'}"
    )
    for known in attention_backends.BACKENDS:
        assert f"{known}: " in told
    assert "CPU_ATTN: available" in told and "FLASH_ATTN: available" not in told
    assert kvern_kernels.paged_attention is cpu.paged_attention  # as before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 9, "causal": False},
        {"window": 9},
        {"sinks": 1},
        {"alibi": 1, "window": 30},
        {"softcap": 3.0},
    ],
    ids=str,
)
def test_torch_attention_matches_the_reference(options: dict) -> None:
    keys, values = (torch.randn(12, 2, 16, 32) for _ in range(2))
    tables = torch.randperm(12).int().view(3, 4)
    starts, ends = (
        torch.tensor([0, 1, 1, 21], dtype=torch.int32),
        torch.tensor([40, 17, 50], dtype=torch.int32),
    )
    q = torch.randn(21, 6, 32)
    given = {k: torch.rand(6) if k in ("alibi", "sinks") else v for k, v in options.items()}
    arguments = (q, keys, values, tables, starts, ends, AttentionOptions(0.2, **given))
    torch.testing.assert_close(
        attention_backends.sdpa_attention(*arguments),
        reference.paged_attention(*arguments),
        rtol=1e-5,
        atol=1e-5,
    )
