"""Flags as people spell them: mapped with one line, refused with the reason, never silently lost."""

from __future__ import annotations

import argparse

import pytest

from kvern.rpc.spellings import ELSEWHERE, IMPLIED, RENAMED, UNBUILT, parse, translate

KNOWN = {
    "--model",
    "--max-model-len",
    "--long-prefill-token-threshold",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--trust-remote-code",
    "--http-port",
    "--cudagraph-capture-sizes",
    "--lora-modules",
    "--kv-offloading-size",
    "--mm-processor-kwargs",
}
SWITCHES = {"--enable-prefix-caching", "--no-enable-prefix-caching", "--trust-remote-code"}


@pytest.mark.parametrize(
    ("given", "expected", "note"),
    [
        ("--max-model-len 8192", "--max-model-len 8192", ""),
        ("--max_model_len 8192", "--max-model-len 8192", ""),
        ("--max-model-len=8192", "--max-model-len=8192", ""),
        (
            "--context-window-size 8k",
            "--max-model-len 8k",
            "--context-window-size is called --max-model-len here",
        ),
        (
            "--context_window_size=8k",
            "--max-model-len=8k",
            "--context_window_size is called --max-model-len here",
        ),
        (
            "--chunked_prefill_token_size 512",
            "--long-prefill-token-threshold 512",
            "--chunked_prefill_token_size is called --long-prefill-token-threshold here",
        ),
        ("--enable-prefix-caching true --model m", "--enable-prefix-caching --model m", ""),
        ("--enable_prefix_caching False", "--no-enable-prefix-caching", ""),
        ("--enable-prefix-caching=true", "--enable-prefix-caching", ""),
        ("--gguf_model a.gguf", "--model a.gguf", "--gguf_model is called --model here"),
        ("--chunked-prefill", "", "--chunked-prefill is called --enable-chunked-prefill here"),
        (
            "--cuda-graph-sizes 4",
            "--cudagraph-capture-sizes 4",
            "--cuda-graph-sizes is called --cudagraph-capture-sizes here",
        ),
        ("-pcp 1", "", "-pcp is called --prefill-context-parallel-size here"),
        ("--lora-modules a=/x --model m", "--lora-modules a=/x --model m", ""),
        (
            '--lora_modules a=/x {"name":"b","path":"/y"} folder',
            '--lora-modules a=/x --lora-modules {"name":"b","path":"/y"} folder',
            "",
        ),
        ("--lora-modules=a=/x --lora-modules b=/y", "--lora-modules=a=/x --lora-modules b=/y", ""),
        ("--lora-modules folder", "--lora-modules folder", ""),
        ("--swap-space 4", "--kv-offloading-size 4", "--swap-space is called --kv-offloading-size here"),
        ("--model -- --x", "--model -- --x", ""),
        ("folder --max-model-len -1", "folder --max-model-len -1", ""),
    ],
)
def test_taken(given: str, expected: str, note: str) -> None:
    translation = translate(given.split(), KNOWN, SWITCHES)
    assert translation.argv == expected.split()
    assert bool(translation.notes) == bool(note)
    if note:
        assert translation.notes[0].startswith(note)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("-pcp 2", "-pcp .here --prefill-context-parallel-size. 2: context parallelism is not built yet"),
        ("--kv-offloading-backend lmcache", "any KV offload but the native one is not built yet"),
        ("--speculative-config {}", "speculative decoding is not built yet"),
        ("--enable-eplb", "--enable-eplb: expert load balancing is not built yet"),
        ("--offload-backend prefetch", "weight offload is not built yet"),
        ("--enable-chunked-prefill false", "this cannot be turned off"),
        ("--trust-remote-code false", "leave the flag out"),
        ("--enable-prefix-caching=maybe", "it is true or false"),
        ("--max-modle-len 5", "did you mean --max-model-len?"),
        ("--speculative-confg 2", "did you mean --speculative-config?"),
        ("--zzzz", "there is no --zzzz; see --help"),
        ("--request-rate 50", "kvern bench serve"),
        ("-tp 2", "--tensor-parallel-size belongs to another command: kvern-worker"),
    ],
)
def test_refused(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("?", r"\?")):
        translate(given.split(), KNOWN, SWITCHES)


def test_once_a_service_knows_a_flag_nothing_is_said_of_it() -> None:
    known = KNOWN | {"--tensor-parallel-size", "--enforce-eager"}
    translation = translate(["-tp", "2", "--enforce-eager"], known, SWITCHES | {"--enforce-eager"})
    assert translation.argv == ["--tensor-parallel-size", "2", "--enforce-eager"]
    assert translation.notes == ["-tp is called --tensor-parallel-size here"]


def test_every_old_name_leads_somewhere() -> None:
    ends = {*KNOWN, *IMPLIED, *UNBUILT, *ELSEWHERE}
    assert set(RENAMED.values()) <= ends
    assert not set(IMPLIED) & set(UNBUILT) and not set(ELSEWHERE) & {*KNOWN, *IMPLIED, *UNBUILT}


def test_a_parser_says_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="kvern-worker")
    parser.add_argument("--max-model-len")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    arguments = parse(parser, ["--context-window-size", "8k", "--enable-prefix-caching", "false"])
    assert (arguments.max_model_len, arguments.enable_prefix_caching) == ("8k", False)
    assert capsys.readouterr().err == "kvern-worker: --context-window-size is called --max-model-len here\n"
    with pytest.raises(SystemExit) as ended:
        parse(parser, ["-pcp", "2"])
    assert ended.value.code == 2
    assert "context parallelism is not built yet" in capsys.readouterr().err
