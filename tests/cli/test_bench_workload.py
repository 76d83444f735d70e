"""Loads that are drawn, and traces that are replayed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvern_gateway.cli.bench_workload import LoadOptions, draw

MOONCAKE = [
    {"timestamp": 27_482, "input_length": 1_100, "output_length": 52, "hash_ids": [46, 47, 2_353]},
    {"timestamp": 30_535, "input_length": 1_300, "output_length": 26, "hash_ids": [46, 47, 2_354]},
    {"timestamp": 36_000, "input_length": 600, "output_length": 1, "hash_ids": [9]},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> LoadOptions:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return LoadOptions(dataset_name="mooncake", dataset_path=path)


def test_mooncake_gives_lengths_times_and_what_prompts_share(mooncake: LoadOptions) -> None:
    prompts, times = draw(mooncake)
    assert times == pytest.approx([0, 3.053, 8.518])
    assert [(len(prompt.token_ids), prompt.output_len) for prompt in prompts] == [
        (1100, 52),
        (1300, 26),
        (600, 1),
    ]
    first, second, third = (prompt.token_ids for prompt in prompts)
    assert first[:1024] == second[:1024] and first[1024:] != second[1024:1100]
    assert first[:512] != third[:512]
    assert draw(mooncake) == (prompts, times)


def test_a_trace_is_made_faster_and_smaller(mooncake: LoadOptions) -> None:
    small = LoadOptions(**{**vars(mooncake), "trace_speed": 2.0, "length_scale": 0.5, "num_prompts": 2})
    prompts, times = draw(small)
    assert times == pytest.approx([0, 1.5265])
    assert [(len(prompt.token_ids), prompt.output_len) for prompt in prompts] == [(550, 26), (650, 13)]
    assert prompts[0].token_ids[:512] == prompts[1].token_ids[:512]
    assert prompts[0].token_ids[512:] != prompts[1].token_ids[512:550]


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    prompts, times = draw(LoadOptions(dataset_name="burstgpt", dataset_path=path))
    assert times == [0, 113]
    assert [(len(prompt.token_ids), prompt.output_len) for prompt in prompts] == [(472, 18), (417, 276)]


def test_a_rate_replaces_a_traces_times(mooncake: LoadOptions) -> None:
    _, times = draw(LoadOptions(**{**vars(mooncake), "request_rate": 10.0}))
    assert times[-1] == pytest.approx(0.3)


def test_prefixes_are_repeated_evenly() -> None:
    options = LoadOptions(
        dataset_name="prefix_repetition",
        num_prompts=40,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=16,
        prefix_repetition_suffix_len=8,
    )
    prompts, times = draw(options)
    assert set(times) == {0.0}
    assert Counter(Counter(tuple(prompt.token_ids[:16]) for prompt in prompts).values()) == {10: 4}
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 40


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("mooncake", '{"timestamp": 1}', "line 1 of the trace is not one of Mooncake's"),
        ("mooncake", "\n", "holds no request"),
        ("burstgpt", "a,b\n1,2", "line 2 of the trace is not one of BurstGPT's"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        draw(LoadOptions(dataset_name=name, dataset_path=path))
    with pytest.raises(ValueError, match="No such file"):
        draw(LoadOptions(dataset_name=name, dataset_path=tmp_path / "absent"))
    with pytest.raises(ValueError, match="needs --dataset-path"):
        draw(LoadOptions(dataset_name=name))
