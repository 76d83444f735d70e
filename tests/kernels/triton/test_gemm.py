"""Linear layers over every weight form against the reference."""

from collections.abc import Iterator

import pytest
import torch
from packed_weights import KINDS, both, gptq

from kvern_kernels import reference
from kvern_kernels.triton import gemm, launch, packing


@pytest.fixture
def invariant() -> Iterator[None]:
    launch.use_batch_invariant(True)
    yield
    launch.use_batch_invariant(False)


def to(packed: packing.PackedLinear, device: str) -> packing.PackedLinear:
    """`packed` with its planes on `device`."""
    planes = {name: getattr(packed, name) for name in (*packing.PLANES, "bias", "order")}
    moved = {name: plane.to(device) for name, plane in planes.items() if plane is not None}
    return packing.replace(packed, **moved)


@pytest.mark.parametrize("kind", KINDS)
def test_linear(device: str, kind: str) -> None:
    expected, packed = KINDS[kind]()
    packed = to(packed, device)
    assert (packed.in_features, packed.out_features) == (expected.in_features, expected.out_features)
    for rows in (0, 1, 35):
        x = torch.randn(rows, expected.in_features + 3)[:, 3:]
        got, wanted = gemm.linear(x.to(device), packed).cpu(), reference.linear(x, expected)
        assert got.shape == wanted.shape
        assert ((got - wanted).norm(dim=1) <= 1e-6 * wanted.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "gptq 4", "w8a8 fp8 blocks"])
def test_half_precision_is_rounded_once_a_weight(device: str, kind: str, dtype: torch.dtype) -> None:
    expected, packed = KINDS[kind]()
    x = torch.randn(3, expected.in_features).to(dtype)
    got = gemm.linear(x.to(device), to(packed, device), torch.float32).cpu()
    wanted = reference.linear(x, expected, torch.float32)
    assert (got - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps


def test_one_program_walks_over_many_tiles(device: str) -> None:
    weight = torch.randn(200, 40)
    x = torch.randn(130, 40)
    with launch.pretend(launch.Chip("few", "cuda", 90, 32, 227 << 10, processors=3)):
        got = gemm.linear(x.to(device), packing.pack_linear(weight.to(device))).cpu()
    torch.testing.assert_close(got, x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_a_shard_of_a_reordered_matrix_has_groups_of_any_size(device: str) -> None:
    n, k = 16, 64
    index = torch.randint(0, 4, (k,), dtype=torch.int32)
    whole = gptq(n, k, 4, 16)
    assert whole[1].kind == "int4"
    words = torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int64).to(torch.int32)
    zeros, scales = torch.zeros(4, n // 8, dtype=torch.int32), torch.rand(4, n)
    expected, packed = both("pack_gptq", words, zeros, scales, index)
    assert packed.kind == "plain"
    x = torch.randn(2, k)
    got = gemm.linear(x.to(device), to(packed, device)).cpu()
    torch.testing.assert_close(got, reference.linear(x, expected), rtol=1e-4, atol=1e-4)


def test_rows_do_not_depend_on_their_neighbours(device: str, invariant: None) -> None:
    _, packed = KINDS["gptq 4"]()
    packed = to(packed, device)
    x = torch.randn(67, packed.in_features, device=device)
    together = gemm.linear(x, packed)
    assert torch.equal(gemm.linear(x[66:], packed), together[66:])
    assert torch.equal(gemm.linear(x[2:9], packed), together[2:9])


@pytest.mark.parametrize("chip", launch.CHIPS)
def test_invariant_tiles_are_those_of_any_number_of_rows(chip: str, invariant: None) -> None:
    def constants(kind: str, rows: int) -> list[dict]:
        packed = gemm.example(kind, 4096, 14336)
        x = torch.empty((rows, 14336), dtype=torch.bfloat16, device="meta")
        launches = launch.record(launch.CHIPS[chip], lambda: gemm.linear(x, packed))
        return [{k: v for k, v in one.options.items() if k != "PROGRAMS"} for one in launches]

    for kind in ("plain", "int4", "w8a8 int8"):
        assert constants(kind, 1) == constants(kind, 16) == constants(kind, 5000)
        launch.use_batch_invariant(False)
        assert constants(kind, 1) != constants(kind, 5000)
        launch.use_batch_invariant(True)


def test_a_wrong_width_is_named() -> None:
    with pytest.raises(ValueError, match="41 features, the weights take 40"):
        gemm.linear(torch.randn(2, 41), packing.pack_linear(torch.randn(3, 40)))
