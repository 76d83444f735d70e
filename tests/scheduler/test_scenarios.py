"""Readable transcripts of the core: commands, and the plans and events that they give.

A scenario is a file in scenarios/. Each command line is followed by its output, indented. Run with
KVERN_REWRITE_SCENARIOS=1 to write the outputs anew, then read the diff.

    pool blocks=8 block_size=4 seqs=4 budget=16 caching=on    starts a core and its strict simulated worker
    submit NAME prompt=9 max_tokens=3 [from=0] [n=1] [priority=0]    prompt: so many tokens, numbered from ``from``
    plan | fold | cancel NAME[.CHOICE] | lose keep|drop | state | run
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from scheduler.core_harness import CoreHarness

from kvern.errors import KvernError
from kvern.v1 import sampling_pb2
from kvern_scheduler.core.plan import Plan
from kvern_scheduler.core.requests import Request, Sequence
from kvern_worker.sim import SimConfig

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
INDENT = "    "


class Script:
    """Runs the commands of one scenario."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}

    def run(self, line: str) -> list[str]:
        command, *words = shlex.split(line)
        names = [word for word in words if "=" not in word]
        fields = dict(word.split("=") for word in words if "=" in word)
        method: Callable[..., list[str]] = getattr(self, f"do_{command}")
        lines = method(*names, **fields)
        if command != "pool":
            self.core.cell.check_integrity()
        return lines

    def do_pool(
        self,
        blocks: str,
        block_size: str = "4",
        seqs: str = "4",
        budget: str = "16",
        caching: str = "on",
        preemptions: str = "3",
    ) -> list[str]:
        config = SimConfig(
            num_blocks=int(blocks),
            block_size=int(block_size),
            max_num_seqs=int(seqs),
            max_num_batched_tokens=int(budget),
            max_model_len=200,
            vocab_size=100,
            strict=True,
        )
        self.core = CoreHarness(
            config, enable_prefix_caching=caching == "on", max_preemptions=int(preemptions)
        )
        return []

    def do_submit(self, name: str, prompt: str, max_tokens: str, **fields: str) -> list[str]:
        first = int(fields.pop("from", "0"))
        tokens = [(first + i) % 100 for i in range(int(prompt))]
        numbers = {key: int(value) for key, value in fields.items()}
        try:
            self.requests[name] = self.core.submit(tokens, int(max_tokens), name=name, **numbers)
        except KvernError as error:
            return [f"refused: {error.message}"]
        return [f"waiting={self.core.group.queue.num_waiting}"]

    def do_plan(self) -> list[str]:
        preempted = self.core.group.num_preemptions
        plan = self.core.plan()
        lines = [] if plan is None else self.describe(plan)
        if self.core.group.num_preemptions > preempted:
            lines.append(f"preempted {self.core.group.num_preemptions - preempted}")
        return lines or ["nothing to do"]

    def do_fold(self) -> list[str]:
        self.core.fold()
        self.core.now += 1
        return self.events()

    def do_cancel(self, name: str) -> list[str]:
        name, _, choice = name.partition(".")
        self.core.cell.cancel(self.requests[name].sequences[int(choice or 0)], self.core.now)
        return self.events()

    def do_lose(self, what: str) -> list[str]:
        self.core.lose(keep_blocks=what == "keep")
        return self.do_state()

    def do_run(self) -> list[str]:
        self.core.run()
        return self.events()

    def do_state(self) -> list[str]:
        group = self.core.group
        pool = group.pool
        held = pool.num_blocks - pool.num_available
        running = [self.name(s) for s in group.batch.sequences if s is not None]
        waiting = [self.name(s) for s in sorted(group.queue, key=lambda s: s.rank)]
        return [
            f"blocks free={pool.num_free} cached={pool.num_cached} held={held} reserved={group.num_reserved}",
            f"running [{' '.join(running)}] waiting [{' '.join(waiting)}]",
        ]

    def describe(self, plan: Plan) -> list[str]:
        lines = [f"step {plan.step}"]
        if plan.released:
            lines.append(f"release {plan.released}")
        lines += [
            f"enter {entry.slot}: {self.name(entry.sequence)} tokens={entry.tokens.size} "
            f"computed={entry.num_computed} blocks={self.blocks(entry.blocks, entry.generations)}"
            for entry in plan.entries
        ]
        if plan.append_slots.size:
            blocks = self.blocks(plan.append_blocks, plan.append_generations)
            lines.append(f"append {plan.append_slots.tolist()}: {blocks}")
        for slot, length in zip(plan.prefill_slots, plan.prefill_lengths, strict=True):
            lines.append(f"prefill {slot}: {length}")
        if plan.decoded.size:
            lines.append(f"decode {plan.decoded.slots.tolist()}")
        return lines

    def blocks(self, blocks: object, generations: object) -> str:
        """block:generation"""
        pairs = zip(blocks.tolist(), generations.tolist(), strict=True)  # type: ignore[attr-defined]
        return " ".join(f"{block}:{generation}" for block, generation in pairs)

    def events(self) -> list[str]:
        changes = self.core.cell.take_changes()
        lines = []
        by_row = {s.row: s for request in self.requests.values() for s in request.sequences}
        for tokens in changes.tokens:
            shown = [
                f"{self.name(by_row[row])}[{index}]"
                for row, index in zip(tokens.rows.tolist(), tokens.indexes.tolist(), strict=True)
            ]
            lines.append("tokens " + " ".join(shown))
        if changes.indexed:
            shown = [self.blocks(entry.blocks, entry.generations) for entry in changes.indexed]
            lines.append("index blocks " + " ".join(shown))
        for sequence in changes.finished:
            finish = sequence.finish
            assert finish is not None
            reason = sampling_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_")
            lines.append(f"{self.name(sequence)} {reason} after {finish.num_output_tokens}")
        return lines or ["nothing"]

    def name(self, sequence: Sequence) -> str:
        name = sequence.request.submission.request_id
        return f"{name}.{sequence.choice}" if sequence.request.submission.n > 1 else name


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    script, out = Script(), []
    for line in path.read_text().splitlines():
        if line.startswith(INDENT):
            continue
        out.append(line)
        if line and not line.startswith("#"):
            out += [INDENT + text for text in script.run(line)]
    transcript = "\n".join(out) + "\n"
    if os.environ.get("KVERN_REWRITE_SCENARIOS"):
        path.write_text(transcript)
    assert transcript == path.read_text()
