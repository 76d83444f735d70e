"""`kvern bench path`: HTTP client → gateway → scheduler → simulated worker, and which process the time goes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvern_gateway.cli import bench_serve, bench_stack
from kvern_gateway.cli.load_client import Target
from kvern_gateway.cli.ports import claim_port
from kvern_gateway.cli.stack import DEFAULT_MODEL_VOCAB_SIZE


@dataclass(frozen=True)
class PathOptions:
    streams: int
    input_len: int = 32
    output_len: int = 128
    num_prompts: int | None = None
    store: str = "memory"
    appendfsync: str = "always"
    step_us: int = 0

    @property
    def total_prompts(self) -> int:
        return self.num_prompts or max(24, 8 * self.streams)


async def run(options: PathOptions) -> dict[str, Any]:
    """The result of the load, with CPU time by process. Raises ChildFailed, ConnectionError, TimeoutError."""
    http_port = claim_port("127.0.0.1", 0, "--http-port")
    grpc_port = claim_port("127.0.0.1", 0, "--grpc-port")
    blocks = options.streams * ((options.input_len + options.output_len) // 16 + 2)
    flags = {
        "sim_step_us": options.step_us,
        "sim_num_blocks": 2 * blocks + 1024,
        "max_num_seqs": max(options.streams, 1),
    }
    async with bench_stack.running(
        "worker",
        "scheduler",
        "gateway",
        store=options.store,
        appendfsync=options.appendfsync,
        flags=flags,
        http_port=http_port,
        grpc_port=grpc_port,
    ) as bench:
        await bench_stack.until_healthy(Target("127.0.0.1", http_port))
        bench.supervisor.mark_ready()
        load = bench_serve.ServeOptions(
            base_url=f"http://127.0.0.1:{http_port}",
            num_prompts=options.total_prompts,
            random_input_len=options.input_len,
            random_output_len=options.output_len,
            random_vocab_size=DEFAULT_MODEL_VOCAB_SIZE,
            max_concurrency=options.streams,
            num_warmups=2,
            extra_body={"temperature": 0},
        )
        before = bench.cpu_seconds()
        result = await bench_serve.run(load)
        after = bench.cpu_seconds()
    tokens = max(result["total_output_tokens"], 1)
    cpu = {name: after[name] - before.get(name, 0.0) for name in after}
    cpu["client"] = result["client_cpu_us_per_event"] * result["num_stream_events"] / 1e6
    return {
        "streams": options.streams,
        "store": options.store,
        "sim_step_us": options.step_us,
        "cpu_s": cpu,
        "cpu_us_per_token": {name: seconds * 1e6 / tokens for name, seconds in cpu.items()},
        **result,
    }


def render(result: dict[str, Any]) -> str:
    shares = sorted(result["cpu_us_per_token"].items(), key=lambda item: -item[1])
    return "\n".join(
        [
            f"streams {result['streams']}, store {result['store']}, simulated step {result['sim_step_us']} µs",
            f"output  {result['output_throughput']:.0f} tokens/s ({result['completed']} requests, {result['failed']} failed)",
            f"TTFT    {result['median_ttft_ms']:.1f} ms median, {result['p99_ttft_ms']:.1f} ms p99",
            f"ITL     {result['median_itl_ms']:.2f} ms median, {result['p99_itl_ms']:.2f} ms p99",
            "CPU     " + ", ".join(f"{name} {us:.1f} µs" for name, us in shares) + " per token",
        ]
    )
