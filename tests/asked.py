"""``make asked``: what people ask of an engine like vLLM, row by row, with the tests that prove it → ASKED.md.

A row is *yes* where its tests prove it whole, *partly* where the note says what is missing, *no* where it is not built; a
flag of the last kind is refused by name. The tests are run, and the table says which passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "ASKED.md"


@dataclass(frozen=True)
class Row:
    asked: str
    """The flag or feature, as it is asked for."""
    here: str
    """What it is in Kvern."""
    tests: tuple[str, ...] = ()
    """Files or test ids below tests/."""
    missing: str = ""
    """What is not there yet; all of it where there are no tests."""

    @property
    def state(self) -> str:
        return "yes" if not self.missing else "partly" if self.tests else "no"


REFUSED = "refused by name"
SPELLINGS = "contract/test_spellings.py"

ROWS: dict[str, list[Row]] = {
    "Model loading and engine": [
        Row("`--model`", "`kvern up MODEL`, `--model`", ("parity/test_smollm2_parity.py", "e2e/test_up.py")),
        Row("`--dtype auto`", "`--dtype`", ("worker/test_worker_config.py",)),
        Row(
            "`--load-format auto`",
            "`--load-format auto, safetensors, pt, gguf, dummy`",
            ("worker/test_worker_loaders.py",),
        ),
        Row(
            "`--max-model-len 8192`, `8k`, `auto`",
            "`--max-model-len`",
            ("contract/test_flags.py", "e2e/test_bad_input.py"),
        ),
        Row(
            "load progress and times",
            "a log line per phase, bytes in Describe, bars in `kvern up`",
            ("e2e/test_up.py",),
        ),
        Row(
            "own architectures, own tokenizers, `trust_remote_code`",
            "entry points `kvern.models`",
            ("parity/test_family_parity.py",),
        ),
        Row(
            "`--enforce-eager`, `--cudagraph-capture-sizes`",
            "on a GPU decode steps are CUDA graphs of padded batches",
            ("worker/gpu/test_gpu_parts.py", "worker/gpu/test_gpu_worker.py"),
            "padded steps are run by Triton's interpreter; no graph was captured on a GPU yet",
        ),
        Row(
            "`--device cuda`",
            "the same executor on Triton kernels; sampling on the device",
            ("worker/gpu/test_gpu_worker.py", "worker/gpu/test_gpu_parts.py"),
            "interpreted, not yet run on a GPU; no hybrids, images, MLA",
        ),
    ],
    "Parallelism": [
        Row(
            "`--tensor-parallel-size`",
            "ranks over gloo, each sent every plan; Llama, Mistral, Qwen2/3, Gemma, Phi-3, Granite, Mixtral, Qwen-MoE",
            ("worker/test_worker_groups.py",),
            "other families; NCCL",
        ),
        Row("`--pipeline-parallel-size`", "", missing=REFUSED),
        Row(
            "`--data-parallel-size`",
            "of `kvern up`; or several `--worker` of one scheduler; routed by cached prefix and load",
            ("scheduler/test_scheduler_service.py", "scheduler/test_core_routing.py", "cli/test_settings.py"),
            "p99 at skewed lengths against least requests is 1.5 times better, not 2",
        ),
        Row(
            "`--enable-expert-parallel`, `moe_expert_parallel_size`",
            "over the tensor parallel ranks, which see the same tokens and add up",
            ("worker/test_worker_groups.py",),
            "over data parallel groups; all-to-all",
        ),
        Row("`--decode-context-parallel-size`, `context_parallel_size`", "", missing=REFUSED),
        Row("`--dcp-comm-backend`", "", missing=REFUSED),
        Row(
            "`--master-addr`, `--master-port`, `--nnodes`",
            "errors that name the rank, port or value at fault within 10 s",
            ("worker/test_worker_groups.py",),
        ),
    ],
    "KV cache": [
        Row(
            "paged attention, block tables",
            "`core/blocks.py`, paged kernels",
            ("scheduler/test_core_machine.py", "kernels/test_attention_kernel.py"),
        ),
        Row("`--block-size`", "`--block-size`", ("worker/test_worker_parity.py",)),
        Row(
            "`--gpu-memory-utilization`, `--kv-cache-memory-bytes`",
            "the same",
            ("worker/test_worker_config.py",),
        ),
        Row(
            "`--enable-prefix-caching`, SHA-256",
            "chained SHA-256 over canonical CBOR; on by default",
            ("contract/test_block_hash.py", "scheduler/test_core_machine.py"),
        ),
        Row(
            "cross-request sharing, n > 1 shares its prompt", "prefix cache", ("scheduler/test_scenarios.py",)
        ),
        Row(
            "cache hit rate",
            "`vllm:prefix_cache_*`, `kvern_cache_hit_rate`",
            ("scheduler/test_scheduler_metrics.py",),
        ),
        Row(
            "`--mamba-block-size`, hybrid models",
            "a state per sequence, kept at block boundaries for prefix hits",
            (
                "parity/test_family_parity.py",
                "scheduler/test_core_machine.py",
                "worker/test_worker_states.py",
            ),
        ),
        Row(
            "`--swap-space`, `--kv-offloading-size`",
            "the same, with `--kv-offloading-policy` and a disk tier (`--kv-offloading-dir`)",
            (
                "scheduler/test_core_tiers.py",
                "worker/test_worker_tiers.py",
                "simulation/test_simulation.py",
            ),
            "from CPUs; on GPUs, and of models that keep states, refused by name",
        ),
    ],
    "Scheduling": [
        Row(
            "continuous batching",
            "`core/planner.py`",
            ("scheduler/test_core_planner.py", "scheduler/test_scenarios.py"),
        ),
        Row(
            "chunked prefill, `chunked_prefill_token_size`",
            "always; `--max-num-batched-tokens`, `--long-prefill-token-threshold`",
            ("parity/test_smollm2_parity.py", SPELLINGS),
        ),
        Row("`--max-num-seqs`, `--max-num-batched-tokens`", "the same", ("scheduler/test_core_planner.py",)),
        Row(
            "preemption by recompute",
            "same tokens after it",
            ("parity/test_smollm2_parity.py", "scheduler/test_core_machine.py"),
        ),
        Row("asynchronous scheduling", "two plans in flight, always", ("scheduler/test_worker_service.py",)),
    ],
    "Kernels and attention": [
        Row(
            "`--attention-backend`", "chosen by device, reasons logged", ("kernels/test_kernel_dispatch.py",)
        ),
        Row(
            "GQA, sliding window, soft cap, ALiBi, sinks",
            "C++ on CPUs, Triton for GPUs",
            ("kernels/test_attention_kernel.py", "kernels/triton/test_attention.py"),
            "Triton kernels are interpreted and compiled ahead of time, not yet run on a GPU",
        ),
        Row("fallback with a warning", "C++ → torch reference", ("kernels/test_kernel_dispatch.py",)),
        Row(
            "batch-invariant results",
            "default on CPUs, `--exact` on GPUs",
            ("worker/test_worker_parity.py", "kernels/test_linear_kernel.py"),
        ),
    ],
    "Mixture of experts": [
        Row(
            "Mixtral, Qwen-MoE, DeepSeek, GPT-OSS …",
            "`models/`",
            ("parity/test_family_parity.py", "kernels/test_moe_reference.py"),
        ),
        Row(
            "`--expert-placement-strategy`, `--all2all-backend`",
            "linear and round_robin for every model; each rank sees all tokens",
            ("worker/test_worker_groups.py",),
            "all-to-all between ranks",
        ),
        Row("`--enable-eplb`", "", missing=REFUSED),
    ],
    "Weight offload": [
        Row("`--offload-backend prefetch`, `--cpu-offload-gb`", "", missing=REFUSED),
    ],
    "Quantization": [
        Row(
            "GGUF",
            "all of Q4_0 … Q8_0 and Q2_K … Q6_K as they are; several kinds in one projection converted",
            ("worker/test_worker_gguf_kinds.py", "worker/test_worker_loaders.py"),
        ),
        Row(
            "GPTQ, AWQ, FP8, W8A8, MXFP4",
            "checkpoints as they are; `--quantization fp8 | int8 …` at load; fp8 is computed in bfloat16 on CPUs",
            ("worker/test_worker_quantized.py", "kernels/test_quant_reference.py"),
        ),
    ],
    "LoRA, embeddings and multimodal": [
        Row(
            "`--enable-lora`, `--lora-modules`, `--max-loras`, `--max-cpu-loras`, `--max-lora-rank`, "
            "`/v1/load_lora_adapter`, `/v1/unload_lora_adapter`",
            "the same; gRPC `LoadAdapter`, `UnloadAdapter`, `ListAdapters`; `--allow-runtime-lora-updating`",
            (
                "e2e/test_lora.py",
                "scheduler/test_adapters.py",
                "kernels/test_lora_kernel.py",
                "worker/test_worker_adapters.py",
                "scheduler/test_core_adapters.py",
                "contract/test_block_hash.py",
            ),
        ),
        Row(
            "`--runner pooling`, `--pooler-config`, `/v1/embeddings`, BERT encoders",
            "`--runner`, `--pooler-config`, `/v1/embeddings`, gRPC `Embed`",
            (
                "worker/test_worker_embeddings.py",
                "gateway/test_embeddings.py",
                "e2e/test_embeddings.py::test_a_real_encoder_equals_transformers",
            ),
        ),
        Row(
            "images: LLaVA 1.5, LLaVA-NeXT, Qwen2.5-VL",
            "`image_url` parts, gRPC `ContentPart`; equal to transformers from pixels to tokens",
            (
                "parity/test_vision_parity.py",
                "parity/test_image_processors.py",
                "worker/test_worker_images.py",
                "e2e/test_images.py",
            ),
            "videos, audio, other towers; quantized checkpoints of these families; an encoder budget for a step",
        ),
        Row(
            "`image_processor`, `max_image_size`, `image_input_type`",
            "the checkpoint's image processor; `--mm-processor-kwargs`, `--limit-mm-per-prompt`, `--mm-processor-cache-gb` "
            "(of what the tower has made)",
            ("gateway/test_images.py", "worker/test_worker_images.py", "contract/test_spellings.py"),
            "`--mm-encoder-tp-mode`, `--media-io-kwargs`",
        ),
        Row(
            "`--allowed-media-domains`, `--allowed-local-media-path`; SSRF and decompression bombs refused",
            "the same; private addresses are never asked",
            ("gateway/test_images.py",),
        ),
    ],
    "Logs, metrics, benchmarks": [
        Row(
            "vLLM's metric names",
            "gateway: what clients see; scheduler: what happens inside",
            ("scheduler/test_scheduler_metrics.py", "gateway/test_gateway_process.py"),
        ),
        Row(
            "pending tokens, executing, waiting, gpu_utilization",
            "`kvern_pending_tokens` …, `kvern_gpu_utilization`, `kvern_step_phase_seconds`",
            ("scheduler/test_scheduler_metrics.py", "deploy/test_observability.py"),
        ),
        Row(
            "Grafana",
            "deploy/observability/dashboards, every query answered",
            ("deploy/test_observability.py",),
        ),
        Row("alerts", "deploy/observability/alerts.yaml", ("deploy/test_observability.py",)),
        Row(
            "`--benchmark-length`, `--request-rate`",
            "`kvern bench serve`",
            ("e2e/test_bench.py", "cli/test_bench_client.py", SPELLINGS),
        ),
        Row("parameter sweep", "`kvern bench sweep`", ("cli/test_bench_sweep.py",)),
        Row(
            "traces", "`kvern bench serve --dataset-name mooncake, burstgpt`", ("cli/test_bench_workload.py",)
        ),
        Row(
            "per-request timeline",
            "`kvern explain`, `/v1/requests/ID/timeline`, `OperationsService`",
            ("scheduler/test_timelines.py", "gateway/test_operations.py"),
        ),
        Row(
            "what it is doing, live",
            "`kvern top`; the page at the gateway's `/`",
            ("e2e/test_ui.py",),
        ),
        Row(
            "start, request and step logs",
            "`--log-format`, `--enable-log-requests`, `--enable-logging-iteration-details`, `kvern logging`",
            ("scheduler/test_event_log.py", "worker/test_start_log.py"),
        ),
        Row("OpenTelemetry", "`--otlp-traces-endpoint` on all services", ("e2e/test_traces.py",)),
        Row(
            "profiler",
            "`kvern profile`: phases of steps, kernels, a Chrome trace",
            (
                "worker/test_profiling.py",
                "e2e/test_ui.py::test_profile_times_phases_and_kernels_of_a_running_stack",
            ),
            "kernels on a GPU",
        ),
    ],
    "Deployment": [
        Row(
            "Docker",
            "deploy/docker, deploy/compose.yaml, `make containers`",
            ("deploy/test_compose.py",),
            "the image for GPUs is not built in a test",
        ),
        Row(
            "Kubernetes",
            "deploy/k8s",
            ("deploy/test_kubernetes.py", "deploy/test_custom_resources.py"),
            "LeaderWorkerSet; not run in a cluster",
        ),
        Row(
            "clients of other languages",
            "tests/clients: C++, Go, Java, Node, Python, Ruby",
            ("clients/test_languages.py", "clients/test_readme.py"),
        ),
        Row("YAML `--config`", "`kvern up --config`, `--profile`, `--dry-run`", ("cli/test_settings.py",)),
        Row(
            "wrong configurations",
            "refused with the cause and the fix",
            ("cli/test_wrong_configurations.py",),
        ),
        Row("old and informal spellings", "mapped with a line each, or refused", (SPELLINGS,)),
    ],
    "What only Kvern promises": [
        Row(
            "any process may die; no token is lost, repeated or changed",
            "`kvern bench chaos`, `make simulate`",
            ("chaos", "simulation"),
        ),
        Row(
            "a stream goes on at any gateway",
            "`request_id`, `Last-Event-ID`, gRPC `Stream`",
            ("gateway/test_resume.py", "chaos/test_resumption.py"),
        ),
        Row(
            "rolling upgrades of any service",
            "SIGTERM hands over",
            ("scheduler/test_scheduler_process.py", "gateway/test_gateway_process.py"),
        ),
    ],
}


def run(tests: Sequence[str], report: Path) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    subprocess.run([*argv, *(f"tests/{test}" for test in tests)], cwd=ROOT, check=False)


def outcomes(tests: Sequence[str], report: Path) -> dict[str, bool]:
    """Whether all tests of each file, folder or id passed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    result = {}
    for test in tests:
        own = [case for case in cases if _id(case).startswith(f"tests/{test}")]
        bad = [case for case in own if case.find("failure") is not None or case.find("error") is not None]
        result[test] = bool(own) and not bad
    return result


def _id(case: ElementTree.Element) -> str:
    """As pytest spells it, without a class. The report's own ``file`` is where a test's code lies, be it a library."""
    words = case.get("classname", "").split(".")
    module = next((i for i, word in enumerate(words) if word.startswith("test_")), len(words) - 1)
    return "/".join(words[: module + 1]) + f".py::{case.get('name')}"


def render(passed: dict[str, bool]) -> str:
    lines = [
        "# What is asked for, and what proves it",
        "",
        "Made by `make asked` from [tests/asked.py](tests/asked.py), which runs the tests that it names.",
    ]
    for section, rows in ROWS.items():
        lines += ["", f"## {section}", "", "| asked | here | state | proved by |", "|---|---|---|---|"]
        for row in rows:
            tests = ", ".join(
                f"[{test}](tests/{test}){'' if passed[test] else ' **fails**'}" for test in row.tests
            )
            state = row.state + (f": {row.missing}" if row.missing else "")
            lines.append(f"| {row.asked} | {row.here} | {state} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--report",
        type=Path,
        help="a JUnit file (junit_family=xunit1) of all tests, in place of running them",
    )
    report = parser.parse_args().report
    tests = sorted({test for rows in ROWS.values() for row in rows for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        if report is None:
            report = Path(folder) / "report.xml"
            run(tests, report)
        passed = outcomes(tests, report)
    TABLE.write_text(render(passed))
    failing = [test for test, fine in passed.items() if not fine]
    print(
        f"{TABLE.name}: {len(failing)} of {len(tests)} fail: {', '.join(failing)}"
        if failing
        else f"{TABLE.name}: all pass"
    )
    sys.exit(bool(failing))


if __name__ == "__main__":
    main()
