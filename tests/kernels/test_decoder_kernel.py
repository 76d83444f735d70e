"""The stack of layers in one call gives the bits of its ops one by one."""

import pytest
import torch

from kvern_kernels import cpu, decoder, reference


def make(
    backend, dtype: torch.dtype, qk_norm: bool, gguf: bool, mixed: bool = False
) -> tuple[decoder.Decoder, list[decoder.DecoderLayer]]:
    torch.manual_seed(2)
    width, heads, kv_heads, dim, inner = 96, 6, 2, 32, 160

    def weights(n: int, k: int):
        if gguf:
            blocks = torch.randint(0, 256, (n, k // 32, 34), dtype=torch.uint8)
            blocks[..., :2] = torch.full((n, k // 32, 1), 0.002).half().view(torch.uint8)
            return backend.pack_gguf(blocks.flatten(1), "Q8_0", torch.randn(n) * 0.1)
        return backend.pack_linear((torch.randn(n, k) * k**-0.5).to(dtype), torch.randn(n) * 0.1)

    def mixture() -> decoder.Mixture:
        pairs = [(weights(2 * inner, width), weights(width, inner)) for _ in range(5)]
        experts = backend.pack_experts([up for up, _ in pairs], [down for _, down in pairs])
        return decoder.Mixture(weights(5, width), experts, 2, "sigmoid", bias=torch.randn(5), scale=1.5)

    layers = []
    for window in (0, 5, 0):
        whole = mixed and window == 0  # the layer between is like those of other tests
        norms = [torch.rand(n).to(dtype) + 0.5 for n in (width, width, dim, dim)]
        layers.append(
            decoder.DecoderLayer(
                norms[0],
                weights((heads + 2 * kv_heads) * dim, width),
                weights(width, heads * dim),
                norms[1],
                None if whole else weights(2 * inner, width),
                None if whole else weights(width, inner),
                *backend.new_kv_cache(8, kv_heads, 16, dim, dtype),
                norms[2] if qk_norm else None,
                norms[3] if qk_norm else None,
                window,
                mixture() if whole else None,
                torch.rand(heads * dim).to(dtype) + 0.5 if whole else None,
                torch.rand(kv_heads * dim).to(dtype) + 0.5 if whole else None,
                torch.randn(heads) if whole else None,
            )
        )
    return backend.pack_decoder(layers, torch.randn(64, dim), heads, 1e-5, dim**-0.5), layers


def steps(dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """A prefill of 20 tokens beside one of 3, then a decode step of both."""

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    torch.manual_seed(3)
    tables = ints([[5, 2], [7, 0]])
    slots = torch.tensor([*range(80, 96), *range(32, 36), *range(112, 115)])
    prefill = (
        torch.randn(23, 96).to(dtype),
        torch.tensor([*range(20), *range(3)]),
        slots,
        tables,
        ints([0, 20, 23]),
        ints([20, 3]),
    )
    decode = (
        torch.randn(2, 96).to(dtype),
        torch.tensor([20, 3]),
        torch.tensor([36, 115]),
        tables,
        ints([0, 1, 2]),
        ints([21, 4]),
    )
    return [prefill, decode]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("gguf", "mixed"), [(False, False), (True, False), (False, True)])
def test_one_call_is_the_ops_one_by_one(dtype: torch.dtype, qk_norm: bool, gguf: bool, mixed: bool) -> None:
    fused, layers = make(cpu, dtype, qk_norm, gguf, mixed)
    single, _ = make(cpu, dtype, qk_norm, gguf, mixed)
    plain, _ = make(reference, dtype, qk_norm, gguf, mixed)
    wide, _ = make(reference, torch.float32, qk_norm, gguf, mixed)
    assert fused.structs is not None
    for step in steps(dtype):
        given = step[0].clone()
        actual = cpu.run_decoder(fused, *step)
        for a, b in zip(actual, decoder.run_layers(cpu, single, *step), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(step[0], given)
        got, expected = (
            sum(p.float() for p in parts) for parts in (actual, reference.run_decoder(plain, *step))
        )
        if dtype == torch.float32:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        else:  # layers amplify each rounding: as near to what is true as the reference is
            true = sum(reference.run_decoder(wide, step[0].float(), *step[1:]))
            assert (got - true).norm() < 1.5 * (expected - true).norm() < 0.1 * true.norm()
    for a, b in zip(layers, single.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_layers_of_unknown_parts_run_op_by_op() -> None:
    fused, layers = make(cpu, torch.float32, False, False)
    mixed = [decoder.DecoderLayer(*(getattr(layers[0], name) for name in layers[0].__slots__))]
    object.__setattr__(mixed[0], "o", reference.pack_linear(torch.randn(96, 192)))
    stack = cpu.pack_decoder(mixed, fused.cos_sin, 6, 1e-5, 1.0)
    assert stack.structs is None
    assert cpu.run_decoder(stack, *steps(torch.float32)[0])[0].shape == (23, 96)


def test_a_step_outside_the_cache_is_refused() -> None:
    fused, _ = make(cpu, torch.float32, False, False)
    hidden, positions, slots, *rest = steps(torch.float32)[1]
    for bad in ((hidden, positions + 60, slots, *rest), (hidden, positions, slots + 100, *rest)):
        with pytest.raises(ValueError, match="run_decoder: positions, slots"):
            cpu.run_decoder(fused, *bad)
