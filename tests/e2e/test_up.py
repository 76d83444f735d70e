"""`kvern up`: serves a real model, stops cleanly, and says clearly what is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.running import BIN, Running, alive, run_kvern, until

PROMPTS = [f"Here is a fact about the number {number}:" for number in range(8)]


def test_it_says_where_it_serves_and_how_to_stop(smollm: Running) -> None:
    output = until(lambda: smollm.output if "Ctrl-C" in smollm.output else "", "the greeting")
    assert f"{smollm.base_url}/v1" in output
    assert f"127.0.0.1:{smollm.grpc_port}" in output
    assert "curl" in output
    assert str(smollm.data_dir / "logs") in output
    assert smollm.children().keys() == {"store", "worker", "scheduler", "gateway"}


def test_the_printed_curl_line_works(smollm: Running) -> None:
    line = next(line for line in smollm.output.splitlines() if "curl" in line)
    answer = subprocess.run(
        ["bash", "-c", line.split("try", 1)[1]], capture_output=True, text=True, timeout=60
    )
    assert '"choices"' in answer.stdout, answer


def test_greedy_answers_are_equal_and_sensible(smollm: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name three colors."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answers = [smollm.client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    assert "Red" in texts[0]
    assert answers[0]["usage"]["completion_tokens"] <= 24


def test_a_stream_gives_the_same_text_in_pieces(smollm: Running) -> None:
    whole = smollm.complete(PROMPTS[0], max_tokens=24)["choices"][0]["text"]
    stream = smollm.stream(PROMPTS[0], max_tokens=24)
    assert stream.result() == whole
    assert stream.num_events > 5


def test_a_batch_gives_each_prompt_what_it_gets_alone(smollm: Running) -> None:
    alone = [smollm.complete(prompt, max_tokens=16)["choices"][0]["text"] for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        together = list(threads.map(lambda prompt: smollm.complete(prompt, max_tokens=16), PROMPTS))
    assert [answer["choices"][0]["text"] for answer in together] == alone
    assert len(set(alone)) > 1


def test_the_terminal_chat_answers(smollm: Running) -> None:
    answer = subprocess.run(
        [BIN / "kvern", "chat", "--base-url", smollm.base_url, "--temperature", "0", "--max-tokens", "24"],
        input="Name three colors.\n/exit\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    assert "SmolLM2-135M-Instruct" in answer.stdout
    assert "Red" in answer.stdout


@pytest.mark.slow
def test_the_comparison_runs_the_same_load(smollm: Running) -> None:
    words = (
        "--num-prompts 2 --max-concurrency 2 --input-len 16 --output-len 4 --compare transformers-cb --json"
    )
    answer = subprocess.run(
        [BIN / "kvern", "bench", "serve", "--port", str(smollm.http_port), *words.split()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr
    ours = json.loads(answer.stdout)
    theirs = ours["compare"]
    assert theirs["backend"] == "transformers-cb"
    for result in (ours, theirs):
        assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (
            2,
            32,
            8,
        )
        assert result["output_throughput"] > 0
        assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]


def test_no_prompt_reaches_a_log(smollm: Running) -> None:
    secret = "zanzibarlighthouse"
    smollm.complete(f"The password is {secret}", max_tokens=4)
    smollm.client.post("/v1/completions", json={"prompt": secret, "temperature": -1})
    assert secret not in smollm.logs()
    assert secret not in smollm.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with run_kvern(tmp_path, "--device", "sim") as running:
        pids = running.children()
        assert len(pids) == 4
        assert running.stop(number) == 0
        assert not [name for name, pid in pids.items() if alive(pid)]
        assert "Stopping" in running.output
        assert running.output.rstrip().endswith("Stopped")
        assert "restarting" not in running.output


def test_an_answer_in_flight_does_not_hold_up_the_stop_for_long(tmp_path: Path) -> None:
    with run_kvern(tmp_path, "--device", "sim", "--sim-step-us", "10000") as running:
        stream = running.stream("Once", max_tokens=6000, ignore_eos=True)
        stream.until_events(5)
        pids = running.children()
        assert running.stop(timeout_s=20) == 0
        assert not [name for name, pid in pids.items() if alive(pid)]
        stream.wait(5)
        assert stream.finish_reason is None


def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    with run_kvern(tmp_path, "--device", "sim") as running:
        pids = running.children()
        running.process.kill()
        running.process.wait()
        until(lambda: not any(alive(pid) for pid in pids.values()), "all children ended", 10)


def test_the_same_data_directory_serves_again(tmp_path: Path) -> None:
    for _ in range(2):
        with run_kvern(tmp_path, "--device", "sim") as running:
            assert running.complete("Hello", max_tokens=3)["usage"]["completion_tokens"] == 3
            assert running.stop() == 0


def test_two_servers_do_not_share_a_data_directory(smollm: Running) -> None:
    answer = subprocess.run(
        [BIN / "kvern", "up", "--http-port", "0", "--grpc-port", "0", "--data-dir", smollm.data_dir],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert answer.returncode == 2
    assert f"{smollm.data_dir} is in use by another kvern up (pid {smollm.process.pid})" in answer.stderr


def test_a_memory_store_says_what_that_means(tmp_path: Path) -> None:
    with run_kvern(tmp_path, "--device", "sim", "--store", "memory") as running:
        assert "A restart of the scheduler loses all requests" in running.output
        assert running.children().keys() == {"worker", "scheduler", "gateway"}
        assert running.complete("Hello", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_long_data_directory_still_has_room_for_sockets(tmp_path: Path) -> None:
    with run_kvern(tmp_path / ("long" * 25), "--device", "sim") as running:
        assert running.complete("Hello", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_worker_that_cannot_load_stops_everything_with_its_reason(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"this is no model")
    with run_kvern(tmp_path, str(model), wait=False) as running:
        assert running.process.wait(60) == 2
        assert "worker" in running.output
        assert "gguf" in running.output.lower()
