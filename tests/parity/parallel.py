"""`make parallel`: groups of ranks against one rank, and the table PARALLEL.md. Groups are real processes over gloo."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from scheduler.scheduler_harness import Gateway, make_submit, open_gateway
from worker.conftest import load_executor
from worker.mini_scheduler import MiniScheduler, Sequence, generate, greedy
from worker.remote_group import RemoteGroup, group_of, start_worker
from worker.test_worker_groups import save_model

from kvern.v1.sampling_pb2 import SamplingParams
from kvern_scheduler.server import parse_args, serve
from kvern_scheduler.store.memory import MemoryStore

TABLE = Path(__file__).with_name("PARALLEL.md")
PROMPTS = [[5, 6, 7, 8, 9] * 4, [10, 11, 12], [3] * 40, [7, 7, 8] * 9]
TOKENS = 24
MODELS = {
    "dense": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "experts": (
        "Qwen2Moe",
        {
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
}
TP2, TP4 = ("--tensor-parallel-size", "2"), ("--tensor-parallel-size", "4")
EP, ROBIN = ("--enable-expert-parallel",), ("--expert-placement-strategy", "round_robin")
SPLITS = {
    "dense": {"TP 2": TP2, "TP 4": TP4},
    "experts": {
        "TP 2": TP2,
        "TP 4": TP4,
        "EP 2": (*TP2, *EP),
        "EP 4": (*TP4, *EP),
        "EP 4 round_robin": (*TP4, *EP, *ROBIN),
    },
}
HEAD = """# Groups of ranks

Made by `make parallel`: tiny random models, 4 prompts with 24 greedy tokens each, every group as processes over gloo.

* **tokens**: those of one rank, in float32, all prompts in one batch, in chunks of 7, and preempted once
* **bits**: in bfloat16, log-probabilities of the same group's tokens are the same bits alone and in the batch
* **weights**: bytes of the ranks, least and most, in parts of one rank's; in brackets what the shapes say: 1/N of what is
  split, all of norms and routers, whole experts where they are placed
* **KV**: bytes of a block on each rank, in parts of one rank's: 2 key heads are on 4 ranks twice

| model | split | tokens | bits | weights | KV |
|---|---|---|---|---|---|
"""


def main() -> None:
    rows, wrong = [], 0
    for name, (family, fields) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = save_model(Path(folder), family, **fields)
            alone = load_executor(model)
            expected = generate(alone, PROMPTS, TOKENS)
            whole = alone.describe()
            for split, flags in SPLITS[name].items():
                size, experts = int(flags[1]), EP[0] in flags
                with tempfile.TemporaryDirectory() as place, group_of(Path(place), model, *flags) as group:
                    tokens = generate(group, PROMPTS, TOKENS) == expected  # type: ignore[arg-type]
                    again = generate(group, PROMPTS, TOKENS, chunk=7, preempt_at=5)  # type: ignore[arg-type]
                    weights = sorted(rank.weight_bytes for rank in group.ranks)
                    block = group.ranks[0].bytes_per_block / whole.bytes_per_block
                with (
                    tempfile.TemporaryDirectory() as place,
                    group_of(Path(place), model, *flags, dtype="bfloat16") as group,
                ):
                    bits = logprobs(group, PROMPTS) == [logprobs(group, [one])[0] for one in PROMPTS]
                says = [shares(model, size, rank, experts, "round_robin" in flags) for rank in range(size)]
                fits = all(
                    abs(held / whole.weight_bytes - share) < 0.02
                    for held, share in zip(weights, sorted(says), strict=True)
                )
                fine = tokens and again == expected and bits and fits and block == max(1, 2 // size) / 2
                wrong += not fine
                found = f"{weights[0] / whole.weight_bytes:.3f} to {weights[-1] / whole.weight_bytes:.3f}"
                rows.append(
                    f"| {name} | {split} | {_yes(tokens and again == expected)} | {_yes(bits)} | "
                    f"{found} ({min(says):.3f} to {max(says):.3f}) | {block:g} |"
                )
                print(rows[-1], flush=True)
    lost, same = asyncio.run(cut_link())
    wrong += not same or lost > 1.5
    rows.append(
        f"\nTwo hosts in network namespaces, TP 2 across them, and a second group: the link is cut under 6 streams of 300 "
        f"tokens. The group is given up {lost:.2f} s later (goal: 1.5); all streams end with the same tokens: {_yes(same)}."
    )
    print(rows[-1])
    TABLE.write_text(HEAD + "\n".join(rows) + "\n")
    sys.exit(bool(wrong))


def logprobs(group: RemoteGroup, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities."""
    params = SamplingParams(logprobs=1)
    sequences = MiniScheduler(group).run([Sequence(prompt, params, TOKENS) for prompt in prompts])  # type: ignore[arg-type]
    return [[(p.token_id, p.logprob) for p in sequence.logprobs] for sequence in sequences]


def shares(model: Path, size: int, rank: int, experts: bool, robin: bool) -> float:
    """The part of a model's weights that a rank should hold, by the names and shapes of its tensors."""
    total = held = 0.0
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            shape = file.get_slice(name).get_shape()
            count = float(shape[0] * (shape[1] if len(shape) > 1 else 1))
            # The head is packed beside the embedding that it shares.
            count *= 2 if "embed_tokens" in name and "lm_head.weight" not in file.keys() else 1  # noqa: SIM118
            total += count
            held += count * _share(name, size, rank, experts, robin)
    return held / total


def _share(name: str, size: int, rank: int, experts: bool, robin: bool) -> float:
    if "norm" in name or ".mlp.gate." in name or "shared_expert_gate" in name:
        return 1.0
    if name.endswith(("o_proj.bias", "down_proj.bias")):
        return float(rank == 0)
    if ".k_proj" in name or ".v_proj" in name:
        return max(1, 2 // size) / 2
    if experts and ".experts." in name:
        number, each = int(name.split(".experts.")[1].split(".")[0]), 10 // size
        more = 10 % size
        first = rank * each + min(rank, more)
        mine = number % size == rank if robin else first <= number < first + each + (rank < more)
        return float(mine)
    return 1 / size


async def cut_link() -> tuple[float, bool]:
    """Seconds until the group is given up after its link is cut, and whether all tokens are right."""
    prompt, count, handles = PROMPTS[0], 300, range(6)
    with tempfile.TemporaryDirectory() as folder, two_hosts() as (near, far, within):
        model = save_model(Path(folder), "Llama", rms_norm_eps=1e-6)
        expected = generate(load_executor(model), [prompt], count, greedy())[0]
        ports = [free_port() for _ in range(2)]
        group = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", near)
        workers = [
            start_worker(model, "--listen", f"{near}:{ports[0]}", *group, "--node-rank", "0"),
            start_worker(model, "--listen", f"{far}:{ports[1]}", *group, "--node-rank", "1", within=within),
            start_worker(model, "--listen", f"unix:{folder}/b"),
        ]
        stop = asyncio.Event()
        targets = ("--worker", f"{near}:{ports[0]}", "--worker", f"unix:{folder}/b")
        scheduler = asyncio.create_task(
            serve(parse_args(["--listen", f"unix:{folder}/s", *targets]), MemoryStore(), stop)
        )
        gateway = await open_gateway(f"unix:{folder}/s")
        try:
            async with asyncio.timeout(60):
                while await num_ready(gateway) < 2:
                    await asyncio.sleep(0.1)
            for handle in handles:
                submit = make_submit(handle, prompt, count, params={"ignore_eos": True})
                submit.block_hashes = b""
                await gateway.send(submits=[submit])
            await gateway.until(lambda: all(len(gateway.tokens.get(h, [])) > 20 for h in handles))
            subprocess.run([*within, "ip", "link", "set", "kvern-far", "down"], check=True)
            cut = time.monotonic()
            while await num_ready(gateway) > 1:
                await asyncio.sleep(0.01)
            lost = time.monotonic() - cut
            await gateway.until(lambda: len(gateway.finished) == len(handles), 60)
            return lost, all(gateway.tokens[handle] == expected for handle in handles)
        finally:
            await gateway.close()
            stop.set()
            await scheduler
            for worker in workers:
                worker.kill()
                worker.wait()


async def num_ready(gateway: Gateway) -> int:
    return sum(group.ready for group in (await gateway.status()).groups)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """This host's address, that of another behind a link, and what runs a command there."""
    if os.geteuid():
        sys.exit("make parallel: network namespaces need root")
    name, near, far = f"kvern-{os.getpid()}", "10.77.12.1", "10.77.12.2"
    within = ("ip", "netns", "exec", name)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", "kvern-near", "type", "veth", "peer", "name", "kvern-far", "netns", name)
        ip("addr", "add", f"{near}/30", "dev", "kvern-near")
        ip("link", "set", "kvern-near", "up")
        for words in (
            ("addr", "add", f"{far}/30", "dev", "kvern-far"),
            ("link", "set", "kvern-far", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", name, *words)
        yield near, far, within
    finally:
        ip("netns", "del", name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _yes(fine: bool) -> str:
    return "yes" if fine else "**no**"


if __name__ == "__main__":
    main()
