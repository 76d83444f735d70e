"""Worker groups of real processes over gloo: tokens, shares of memory, and what happens when ranks do not meet or die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
import transformers
from scheduler.scheduler_harness import make_submit, open_gateway
from worker.conftest import COMMON, load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy
from worker.remote_group import group_of

from kvern.errors import KvernError
from kvern.v1 import worker_pb2
from kvern_scheduler.server import parse_args, serve
from kvern_scheduler.store.memory import MemoryStore
from kvern_worker.parallel.rendezvous import Meeting, listen, meet
from kvern_worker.parallel.topology import part_of, placed_experts
from kvern_worker.weights.quantized import AwqMatrix, GgufMatrix, GptqMatrix, quantize
from kvern_worker.weights.shards import cut
from kvern_worker.weights.source import Part

SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
PROMPTS = [[5, 6, 7, 8, 9] * 4, [10, 11, 12], [3] * 40]


def save_model(folder: Path, family: str, **fields: Any) -> Path:
    config = getattr(transformers, f"{family}Config")(**COMMON, **SIZES, **fields)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.2 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases everywhere, and a head that is the embedding: what a rank must not count twice. 263 tokens: no multiple."""
    folder = tmp_path_factory.mktemp("dense")
    return save_model(folder, "Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)


def test_four_ranks_give_the_tokens_of_one(dense: Path, tmp_path: Path) -> None:
    alone = load_executor(dense)
    asking = [
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3},
        {"logprobs": 2, "prompt_logprobs": 1},
        {},
    ]
    params = [greedy(**fields) if "temperature" not in fields else _params(fields) for fields in asking]
    expected = generate(alone, PROMPTS, 12, params)
    with group_of(tmp_path, dense, "--tensor-parallel-size", "4") as group:
        # Whatever the chunks and whoever is preempted: the ranks' batches stay equal.
        assert generate(group, PROMPTS, 12, params) == expected  # type: ignore[arg-type]
        assert generate(group, PROMPTS, 12, params, chunk=7, preempt_at=5) == expected  # type: ignore[arg-type]
        bad = [
            Sequence([5, 6, 999], greedy(), 4),
            Sequence([1, 2], greedy(allowed_token_ids=[9], bad_token_ids=[9]), 4),
            Sequence(PROMPTS[1], params[1], 12),
        ]
        MiniScheduler(group).run(bad)  # type: ignore[arg-type]
        assert [s.error is not None for s in bad] == [True, True, False]
        assert bad[2].output == expected[1]
        # Two key heads on four ranks: each holds one. Weights: the matrices in four parts, norms and some biases whole.
        whole = alone.describe()
        assert [rank.rank for rank in group.ranks] == [0, 1, 2, 3]
        assert {rank.bytes_per_block for rank in group.ranks} == {whole.bytes_per_block // 2}
        assert len({rank.num_blocks for rank in group.ranks}) == 1
        matrices = whole.weight_bytes
        for rank in group.ranks:
            assert matrices / 4 < rank.weight_bytes < matrices / 4 * 1.25


def _params(fields: dict[str, Any]) -> Any:
    from kvern.v1.sampling_pb2 import SamplingParams

    return SamplingParams(**fields)


@pytest.mark.parametrize(
    "flags", [(), ("--enable-expert-parallel", "--expert-placement-strategy", "round_robin")]
)
def test_experts_in_parts_or_as_wholes(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A shared expert with a gate, and five experts on two ranks."""
    fields = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = save_model(tmp_path, "Qwen2Moe", **fields, shared_expert_intermediate_size=64)
    expected = generate(load_executor(model), PROMPTS, 8)
    with group_of(tmp_path, model, "--tensor-parallel-size", "2", *flags) as group:
        assert generate(group, PROMPTS, 8) == expected  # type: ignore[arg-type]
        first, second = (rank.weight_bytes for rank in group.ranks)
        # Three layers, each with an expert more on the first rank.
        expert = 3 * 3 * 128 * 48 * 4
        assert (first - second > 0.9 * expert) == bool(flags)


def test_a_plan_that_not_all_ranks_got_is_dropped_by_all(dense: Path, tmp_path: Path) -> None:
    expected = generate(load_executor(dense), PROMPTS, 6)
    with group_of(tmp_path, dense, "--tensor-parallel-size", "2") as group:
        for rank in (0, 1):
            # Of a leader that died between two writes: one rank waits in the step for the other.
            lost = worker_pb2.StepPlan(epoch=1, step=5)
            new = lost.new_sequences.add(slot=0, num_prompt_tokens=1)
            new.token_ids = (7).to_bytes(4, "little")
            group.send(lost, rank)
            group.reset()
            assert group.run(worker_pb2.StepPlan(epoch=1, step=5)).step == 5
            assert generate(group, PROMPTS, 6) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_outlive_a_rank(dense: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Of two groups, one loses a rank: its requests go on in the other with the same tokens."""
    prompt, count = PROMPTS[0], 200
    expected = generate(load_executor(dense), [prompt], count)[0]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(group_of(tmp_path / "a", dense, "--tensor-parallel-size", "2")),
            stack.enter_context(group_of(tmp_path / "b", dense)),
        ]
        workers = [word for name in ("a", "b") for word in ("--worker", f"unix:{tmp_path}/{name}/w.sock")]
        stop = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        args = parse_args(["--listen", f"unix:{tmp_path}/s", "--metrics-port", str(port), *workers])
        scheduler = asyncio.create_task(serve(args, MemoryStore(), stop))
        gateway = await open_gateway(f"unix:{tmp_path}/s")
        try:
            handles = range(6)
            for handle in handles:
                submit = make_submit(handle, prompt, count, params={"ignore_eos": True})
                # Of blocks of another size.
                submit.block_hashes = b""
                await gateway.send(submits=[submit])
            await gateway.until(lambda: all(len(gateway.tokens.get(h, [])) > 20 for h in handles))
            page = await asyncio.to_thread(urlopen, f"http://127.0.0.1:{port}/metrics")
            ratios = re.findall(r"kvern_comm_compute_ratio\{.*\} (.*)", page.read().decode())
            # The other group is one rank, which has nobody to talk to.
            assert sorted(float(ratio) > 0 for ratio in ratios) == [False, True]
            victim = groups[0].pid_of_rank(1)
            os.kill(victim, how)
            await gateway.until(lambda: len(gateway.finished) == len(handles), 60)
            if how == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)
            for handle in handles:
                assert gateway.tokens[handle] == expected
        finally:
            await gateway.close()
            stop.set()
            await scheduler


def test_a_rank_that_dies_takes_its_group_along(dense: Path, tmp_path: Path) -> None:
    with group_of(tmp_path, dense, "--tensor-parallel-size", "2") as group:
        os.kill(group.pid_of_rank(1), signal.SIGKILL)
        assert group.process.wait(10) == 1


def test_who_does_not_come_is_named() -> None:
    socket_ = listen("127.0.0.1", 0)
    port = socket_.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(KvernError, match=rf"ranks 1, 2 of 3 did not come to 127.0.0.1:{port} within 1 s"):
        meet(Meeting(0, 3, "127.0.0.1", port, 1.0, socket_), {})
    with pytest.raises(KvernError, match=r"rank 1 found no rank 0 at 127.0.0.1:1 within 1 s"):
        meet(Meeting(1, 2, "127.0.0.1", 1, 1.0), {})
    assert time.monotonic() - started < 10
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            KvernError, match=rf"--master-port {port} cannot be used .* held by .*pid {os.getpid()}"
        ):
            listen("127.0.0.1", port)


MEET = """
import json, sys
from kvern_worker.parallel.rendezvous import Meeting, meet
from kvern.errors import KvernError
rank, port, says = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
try:
    print([one["address"] for one in meet(Meeting(rank, 2, "127.0.0.1", port, 30.0), says)[1]])
except KvernError as error:
    print(error.message)
"""


def test_what_differs_is_named_and_a_group_is_joined_once() -> None:
    def other(rank: int, **says: str) -> str:
        words = (sys.executable, "-c", MEET, str(rank), str(port), json.dumps(says))
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip()

    socket_ = listen("127.0.0.1", 0)
    port = socket_.getsockname()[1]
    says = {"version": "2", "model": "m", "address": "a"}
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    MEET,
                    "1",
                    str(port),
                    json.dumps({**says, "version": "1", "address": "b"}),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        alike = "the ranks of a group must be alike: version is 1 on rank 1, and 2 on rank 0"
        with pytest.raises(KvernError, match=alike) as caught:
            meet(Meeting(0, 2, "127.0.0.1", port, 30.0, socket_), says)
        assert caught.value.field == "version"
        assert peer.communicate()[0].strip() == alike
        del caught
    again = listen("127.0.0.1", 0)
    port = again.getsockname()[1]
    peer = subprocess.Popen(
        [sys.executable, "-c", MEET, "1", str(port), json.dumps({**says, "address": "b"})]
    )
    store, said = meet(Meeting(0, 2, "127.0.0.1", port, 30.0, again), says)
    assert [one["address"] for one in said] == ["a", "b"]
    peer.wait(30)
    assert "rank 1 of the group" in (answer := other(1, **says)) and "is taken" in answer
    del store


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--tensor-parallel-size", "3", "--nnodes", "2"), "3 ranks do not divide into 2 nodes"),
        (("--tensor-parallel-size", "2", "--nnodes", "2"), "give it"),
        (("--enable-expert-parallel",), "give --tensor-parallel-size"),
        (("--tensor-parallel-size", "2", "--device", "sim"), "a simulated device is one rank"),
        (
            ("--tensor-parallel-size", "2", "--expert-placement-strategy", "round_robin"),
            "needs --enable-expert-parallel",
        ),
    ],
)
def test_flags_that_contradict_each_other(
    flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvern_worker.server import parse_args as parse_worker

    with pytest.raises(SystemExit):
        parse_worker(flags)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "size", "reason"),
    [
        ("qwen2", 2, "does not divide the 7 attention heads"),
        ("qwen3", 5, "features"),
        ("mistral", 2, "5 attention"),
    ],
)
def test_models_that_do_not_divide(
    checkpoint: Callable[[str], Path], model: str, size: int, reason: str
) -> None:
    from kvern_worker.parallel.topology import Topology

    with pytest.raises(KvernError, match=reason):
        load_executor(checkpoint(model), topology=Topology(size))


def test_placements() -> None:
    linear = [placed_experts(10, 4, rank, "linear") for rank in range(4)]
    assert linear == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    robin = [placed_experts(10, 4, rank, "round_robin") for rank in range(4)]
    assert robin == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert [placed_experts(4, 2, rank, "round_robin") for rank in range(2)] == [[0, 2], [1, 3]]
    assert [part_of(12, 3, rank) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]


def _random_gptq(n: int, k: int, group: int, *, ordered: bool = True) -> GptqMatrix:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)

    index = torch.arange(k, dtype=torch.int32) // group
    index = index if ordered else index.flip(0)
    return GptqMatrix(words(k // 8, n), words(k // group, n // 8), torch.rand(k // group, n), index, 4, 1)


def quantized_matrices() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    words = torch.randint(-(2**31), 2**31, (256, 32), dtype=torch.int64).to(torch.int32)
    return {
        "gptq": _random_gptq(256, 256, 64),
        "awq": AwqMatrix(words, words[:4], torch.rand(4, 256)),
        "gguf": GgufMatrix(torch.randint(0, 60, (256, 256 // 32 * 18), dtype=torch.uint8), "Q4_0"),
        "int8": quantize(weight, "int8 channel"),
        "fp8": quantize(weight, "fp8 channel"),
        "fp8 block": quantize(weight, "fp8 block"),
    }


@pytest.mark.parametrize("kind", list(quantized_matrices()))
@pytest.mark.parametrize(
    "part", [Part([slice(128, 256)]), Part(None, slice(128, 256)), Part([slice(0, 128)], slice(128, 256))]
)
def test_parts_of_quantized_matrices(kind: str, part: Part) -> None:
    matrix = quantized_matrices()[kind]
    assert torch.equal(cut(matrix, part, "w").dequantize(), part.of(matrix.dequantize()))


def test_parts_that_would_split_a_group_are_refused() -> None:
    for matrix, part in (
        (_random_gptq(64, 256, 128), Part(None, slice(0, 64))),
        (_random_gptq(64, 256, 64, ordered=False), Part(None, slice(0, 128))),
        (quantized_matrices()["fp8 block"], Part([slice(0, 64)])),
        (quantized_matrices()["awq"], Part([slice(0, 12)])),
    ):
        with pytest.raises(KvernError, match="choose a smaller --tensor-parallel-size"):
            cut(matrix, part, "w")
