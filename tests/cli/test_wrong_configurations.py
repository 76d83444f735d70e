"""Wrong configurations of every kind, through the programs that people start: each ends by itself, soon, and its last
words name the cause and what to do. A case is one line of the table; what several need is made once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
import trustme
from e2e.running import free_port, until

from kvern_gateway.cli.make_model import make_model
from kvern_gateway.cli.stack import find_store_server

BIN = Path(sys.executable).parent
# Processor time of all that was started: 5 s of two cores, which a busy machine stretches little; the wall clock only ends
# a test that hangs.
CPU_S, HANGS_S = 10.0, 120


@dataclass(frozen=True)
class Wrong:
    """``words`` follow the program; ``{x}`` in them, and in ``says``, is a name that the fixture made or :attr:`files`."""

    words: str
    cause: str
    """Part of the output."""
    fix: str
    """Likewise."""
    program: str = "up"
    env: dict[str, str] = field(default_factory=dict)
    yaml: str = ""
    """Contents of {yaml}."""
    model: dict[str, object] = field(default_factory=dict)
    """Keys of config.json in {model}, a copy of the good one; "-file": remove it; "file=": replace its bytes."""


CASES = {
    # Flags.
    "no such model": Wrong("org/model", "'org/model' is neither a folder nor a file", "give a path"),
    "a misspelt flag": Wrong("--max-model-lenn 5", "there is no --max-model-lenn", "--max-model-len?"),
    "a length in words": Wrong("--max-model-len lots", "'lots'", "neither auto nor a positive number"),
    "an empty block": Wrong("--block-size 0", "argument --block-size: 0", "below 1"),
    "more than all memory": Wrong("--gpu-memory-utilization 1.5", "1.5 is not a share", "at most 1"),
    "an unknown KV dtype": Wrong("--kv-cache-dtype int5", "'int5'", "'int8'"),
    "an unknown dtype": Wrong("--dtype float8", "'float8'", "'bfloat16'"),
    "an unknown format": Wrong("--load-format tensorizer", "'tensorizer'", "'safetensors'"),
    "an unknown quantization": Wrong("{good} --quantization fp4", "fp4 is unknown", "fp8_per_channel"),
    "a negative chunk": Wrong("--long-prefill-token-threshold -5", "threshold: -5", "below 0"),
    "an unknown profile": Wrong("--profile fastest", "--profile fastest", "throughput, latency"),
    "a trace endpoint without a scheme": Wrong("--otlp-traces-endpoint here", "'here'", "start with http://"),
    # Flags that contradict each other, or the model.
    "a step smaller than its batch": Wrong(
        "--max-num-batched-tokens 8 --max-num-seqs 16", "8 is less than --max-num-seqs", "one step"
    ),
    "both ports the same": Wrong("--http-port 18400 --grpc-port 18400", "both 18400", "give them different"),
    "checkpoints of states that nothing reads": Wrong(
        "--mamba-block-size 64 --no-enable-prefix-caching", "has no effect", "leave one of them out"
    ),
    "memory and Redis": Wrong(
        "--store memory --redis-url redis://127.0.0.1:1", "--store memory contradicts", "leave one of them out"
    ),
    "fsync of a store in memory": Wrong(
        "--store memory --appendfsync no", "--appendfsync has no effect", "leave it out"
    ),
    "a simulation's flag without one": Wrong("--sim-step-us 5", "--sim-step-us has no effect", "--device sim"),
    "no room for a block": Wrong("{good} --kv-cache-memory-bytes 1000", "hold no block", "raise --kv-cache"),
    "bits that the checkpoint has not": Wrong("{good} --gptq-bits 4", "contradicts the checkpoint", "leave the"),
    "an attention backend that is not there": Wrong("{good} --attention-backend FLASHMLA", "'FLASHMLA'", "CPU_ATTN"),
    "a pooler of a generator": Wrong('{good} --pooler-config {{}}', "pooler-config is for", "--runner pooling"),
    # Files, variables and folders.
    "no such file": Wrong("--config none.yaml", "--config none.yaml", "No such file"),
    "a file of no flags": Wrong("--config {yaml}", "{yaml}", "`flag: value` lines", yaml="- a"),
    "a file that is not YAML": Wrong("--config {yaml}", "{yaml} is not YAML", "line 1", yaml="a: ["),
    "a misspelt flag in a file": Wrong("--config {yaml}", "{yaml}", "did you mean", yaml="max-seqs: 4"),
    "a wrong type in a file": Wrong("--config {yaml}", "{yaml}", "'many'", yaml="max-num-seqs: many"),
    "a wrong type in a variable": Wrong("", "KVERN_UP_BLOCK_SIZE is 'x'", "integer", env={"KVERN_UP_BLOCK_SIZE": "x"}),
    "a data folder that is a file": Wrong("--data-dir {yaml}", "cannot be used", "--data-dir"),
    "a key that is no digest": Wrong("--api-keys {yaml}", "64 hex", "sha256sum", yaml="- {name: a, sha256: x}"),
    "a key that did not arrive": Wrong("", "KVERN_API_KEY is set and empty", "unset it", "gateway", {"KVERN_API_KEY": ""}),
    # Addresses.
    "a port that is held": Wrong("--http-port {held}", "held by", "--http-port"),
    "a metrics port that is held": Wrong("--metrics-port {held}", "held by", "--metrics-port"),
    "another machine's address": Wrong("--host 192.0.2.1", "192.0.2.1 is no address", "--host"),
    "a scheduler on a held port": Wrong("--listen 127.0.0.1:{held}", "in use", "another", "scheduler"),
    "metrics on a held port": Wrong("--metrics-port {held}", "cannot serve metrics", "--metrics-port", "scheduler"),
    "a worker without a port": Wrong("--worker here", "'here' is not an address", "host:port", "scheduler"),
    "a cell that breaks its keys": Wrong("--cell a{{b}}", "is no name", "letters", "scheduler"),
    # Redis.
    "a URL of something else": Wrong("--redis-url http://x", "--redis-url", "redis://"),
    "a Redis that is not there": Wrong("--redis-url redis://127.0.0.1:{free}", "no connection", "start it"),
    "a Redis that wants a password": Wrong("--redis-url redis://{locked}", "wants a password", "redis://:PASS"),
    "a wrong password": Wrong("--redis-url redis://:guess@{locked}", "refuses our user or password", "correct"),
    "a replica": Wrong("--redis-url redis://{replica}", "read-only replica", "the primary's"),
    "a user without functions": Wrong("--redis-url redis://bob:bob@{locked}", "user may not", "grant"),
    "a database that is not there": Wrong("--redis-url redis://:sesame@{locked}/99", "no such database", "correct"),
    # Model folders.
    "an empty folder": Wrong("{empty}", "{empty} has no tokenizer.json", "save the model"),
    "half a configuration": Wrong("{model}", "config.json is not valid JSON", "line 1", model={"config.json=": b"{"}),
    "no weights": Wrong("{model}", "holds no weights", "*.safetensors", "worker", model={"-model.safetensors": ""}),
    "half of the weights": Wrong(
        "{model}", "cannot read", "download it again", "worker", model={"model.safetensors=": b"x" * 99}
    ),
    "weights of another shape": Wrong(
        "{model}", "[192, 64]", "wants [200, 64]", "worker", model={"intermediate_size": 200}
    ),
    "half a GGUF file": Wrong("{gguf}", "the GGUF header", "cut off"),
    # TLS.
    "a certificate without a key": Wrong("--tls-cert {crt}", "also needs", "--tls-key and --tls-ca", "worker"),
    "another certificate's key": Wrong(
        "--tls-cert {crt} --tls-key {other} --tls-ca {ca}", "{other}", "do not belong together", "worker"
    ),
    "a certificate that is not there": Wrong(
        "--tls-cert none.pem --tls-key {other} --tls-ca {ca}", "none.pem", "No such file", "worker"
    ),
    "authorities of no certificate": Wrong("--ssl-ca-certs {ca}", "no effect without", "--ssl-certfile", "gateway"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the cases name."""
    folder = tmp_path_factory.mktemp("made")
    good = folder / "good"
    make_model(good, "qwen3-toy", "none", 0)
    (folder / "empty").mkdir()
    (folder / "half.gguf").write_bytes(b"GGUF\x03\0\0\0")
    authority = trustme.CA()
    leaf, other = authority.issue_cert("one"), authority.issue_cert("two")
    leaf.cert_chain_pems[0].write_to_path(folder / "crt")
    other.private_key_pem.write_to_path(folder / "other")
    authority.cert_pem.write_to_path(folder / "ca")
    with ExitStack() as stack:
        held = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        locked, replica = free_port(), free_port()
        bob = [
            "--user",
            "default",
            "on",
            ">sesame",
            "~*",
            "&*",
            "+@all",
            "--user",
            "bob",
            "on",
            ">bob",
            "~*",
            "&*",
            "+@all",
            "-function",
        ]
        for port, words in ((locked, bob), (replica, ["--replicaof", "127.0.0.1", "1"])):
            argv = [find_store_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", *words]
            process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            until(lambda port=port: answers(port), "the store answers")
        yield {
            "good": str(good),
            "empty": str(folder / "empty"),
            "gguf": str(folder / "half.gguf"),
            **{name: str(folder / name) for name in ("crt", "other", "ca")},
            "held": str(held.getsockname()[1]),
            "free": str(free_port()),
            "locked": f"127.0.0.1:{locked}",
            "replica": f"127.0.0.1:{replica}",
        }


def answers(port: int) -> bool:
    try:
        redis.Redis(port=port, protocol=2).ping()
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:
        return False
    return True


def command(case: Wrong, names: dict[str, str], folder: Path) -> list[str]:
    words = [word.format(**names) for word in case.words.split()]
    socket_path = f"unix:{folder}/x.sock"
    match case.program:
        case "up":
            ports = [] if "-port" in case.words else ["--http-port", "0", "--grpc-port", "0"]
            data = [] if "--data-dir" in case.words else ["--data-dir", str(folder / "data")]
            return ["kvern", "up", *ports, *data, *words]
        case "scheduler":
            listen = [] if "--listen" in case.words else ["--listen", socket_path]
            worker = [] if "--worker" in case.words else ["--worker", socket_path]
            return ["kvern-scheduler", *listen, *worker, *words]
        case "gateway":
            needed = ["--http-port", "0", "--grpc-port", "0", "--scheduler", socket_path]
            return ["kvern-gateway", *needed, "--model", names["good"], *words]
    model = ["--model", *words] if "{model}" in case.words else ["--device", "sim", *words]
    return ["kvern-worker", "--listen", socket_path, *model]


def prepare(case: Wrong, made: dict[str, str], folder: Path) -> dict[str, str]:
    """The files of this case alone; all names."""
    names = {**made, "yaml": str(folder / "file.yaml"), "model": str(folder / "model")}
    (folder / "file.yaml").write_text(case.yaml)
    if case.model:
        model = folder / "model"
        shutil.copytree(made["good"], model)
        config = json.loads((model / "config.json").read_text())
        for name, value in case.model.items():
            if name.startswith("-"):
                (model / name[1:]).unlink()
            elif isinstance(value, bytes):
                (model / name[:-1]).write_bytes(value)
            else:
                config[name] = value
                (model / "config.json").write_text(json.dumps(config))
    return names


@dataclass(frozen=True)
class Outcome:
    code: int
    said: str
    cpu_s: float
    names: dict[str, str]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, made: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """Of all cases that are tested, several at a time: most of each is waiting for imports."""

    def run(name: str, folder: Path) -> Outcome:
        case = CASES[name]
        names = prepare(case, made, folder)
        program, *words = command(case, names, folder)
        environment = {**os.environ, "COLUMNS": "200", **case.env}
        argv, output = [str(BIN / program), *words], folder / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(argv, stdout=file, stderr=file, env=environment)
        hung = threading.Timer(HANGS_S, process.kill)
        hung.start()
        _, status, usage = os.wait4(process.pid, 0)
        hung.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
        return Outcome(process.returncode, output.read_text(), seconds, names)

    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_it_is_refused"
    ]
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(run, name, tmp_path_factory.mktemp("case")) for name in names}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    case, outcome = CASES[name], outcomes[name].result()
    assert outcome.code in (1, 2), outcome.said
    assert case.cause.format(**outcome.names) in outcome.said, outcome.said
    assert case.fix in outcome.said, outcome.said
    assert "Traceback" not in outcome.said, outcome.said
    assert outcome.cpu_s < CPU_S, f"{outcome.cpu_s:.1f} s of processor time"
