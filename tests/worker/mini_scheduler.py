"""Turns lists of sequences into plans, without any of the real scheduler's cleverness, and collects the results."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvern.rpc.packing import pack_i32, pack_u32, unpack_i32, unpack_u32
from kvern.v1 import error_pb2, media_pb2, worker_pb2
from kvern.v1.sampling_pb2 import SamplingParams, TokenLogprobs
from kvern_worker.executor import ModelExecutor


@dataclass
class Sequence:
    prompt: list[int]
    params: SamplingParams
    max_new: int
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    error: error_pb2.Error | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    # Preempt once when this many tokens are out; 0: never.
    preempt_at: int = 0
    # 1 + the slot of its adapter.
    adapter: int = 0
    media: list[media_pb2.MediaItem] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.output) >= self.max_new


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]


class MiniScheduler:
    """Drives one executor. Blocks are handed out in a shuffled order, so that tables are permuted."""

    def __init__(self, executor: ModelExecutor, shuffle_seed: int = 0) -> None:
        self.executor = executor
        description = executor.describe()
        self.block_size = description.block_size
        self.max_num_seqs = description.max_num_seqs
        self.budget = description.max_num_batched_tokens
        self.free = list(range(description.num_blocks))
        random.Random(shuffle_seed).shuffle(self.free)
        self.step = 0
        self.generation = 0
        executor.reset()

    def run(self, sequences: list[Sequence], chunk: int = 512) -> list[Sequence]:
        """Runs all of them to their end; returns them."""
        waiting = list(sequences)
        running: list[Sequence] = []
        free_slots = list(range(self.max_num_seqs))
        released: list[int] = []
        while waiting or running:
            plan = worker_pb2.StepPlan(epoch=1, step=self.step, released_slots=pack_u32(released))
            self.step += 1
            free_slots += released
            released = []
            while waiting and free_slots:
                sequence = waiting.pop(0)
                sequence.slot, sequence.blocks, sequence.computed = free_slots.pop(0), [], 0
                running.append(sequence)
                plan.new_sequences.append(
                    worker_pb2.NewSequence(
                        slot=sequence.slot,
                        token_ids=pack_i32(sequence.tokens),
                        num_prompt_tokens=len(sequence.prompt),
                        params=sequence.params,
                        adapter_slot=sequence.adapter,
                        media=sequence.media,
                    )
                )
            self._fill(plan, running, chunk)
            self._collect(self.executor.run(plan), running)
            for sequence in list(running):
                preempted = 0 < sequence.preempt_at <= len(sequence.output) and not sequence.done
                if sequence.done or preempted:
                    running.remove(sequence)
                    released.append(sequence.slot)
                    self.free += sequence.blocks
                if preempted:
                    sequence.preempt_at = 0
                    waiting.append(sequence)
        self.executor.run(worker_pb2.StepPlan(epoch=1, step=self.step, released_slots=pack_u32(released)))
        self.step += 1
        return sequences

    def _fill(self, plan: worker_pb2.StepPlan, running: list[Sequence], chunk: int) -> None:
        prefills, lengths, decodes = [], [], []
        appends: list[tuple[int, int]] = []
        budget = self.budget
        for sequence in sorted(running, key=lambda s: len(s.tokens) - s.computed):
            left = len(sequence.tokens) - sequence.computed
            count = min(left, chunk, budget)
            if count == 0:
                continue
            if left == 1 and sequence.output and sequence.computed >= len(sequence.prompt):
                decodes.append(sequence.slot)
            else:
                prefills.append(sequence.slot)
                lengths.append(count)
            budget -= count
            sequence.computed += count
            while len(sequence.blocks) * self.block_size < sequence.computed:
                sequence.blocks.append(self.free.pop())
                appends.append((sequence.slot, sequence.blocks[-1]))
        self.generation += 1
        plan.append_slots = pack_u32([slot for slot, _ in appends])
        plan.append_blocks = pack_u32([block for _, block in appends])
        plan.append_generations = pack_u32([self.generation] * len(appends))
        plan.prefill_slots, plan.prefill_lengths = pack_u32(prefills), pack_u32(lengths)
        plan.decode_slots = pack_u32(decodes)

    def _collect(self, result: worker_pb2.StepResult, running: list[Sequence]) -> None:
        by_slot = {sequence.slot: sequence for sequence in running}
        for slot, token in zip(unpack_u32(result.slots), unpack_i32(result.token_ids), strict=True):
            by_slot[int(slot)].output.append(int(token))
        for failure in result.errors:
            by_slot[failure.slot].error = failure.error
        for report in result.logprobs:
            sequence = by_slot[report.slot]
            if report.HasField("sampled"):
                sequence.logprobs.append(report.sampled)
            for index, logprobs in enumerate(report.prompt):
                sequence.prompt_logprobs[report.first_prompt_index + index] = logprobs


def generate(
    executor: ModelExecutor,
    prompts: list[list[int]],
    max_new: int,
    params: SamplingParams | list[SamplingParams] | None = None,
    chunk: int = 512,
    preempt_at: int = 0,
) -> list[list[int]]:
    """Output tokens of each prompt, all in one batch. Fails on any sequence's error."""
    each = params if isinstance(params, list) else [params or greedy()] * len(prompts)
    sequences = [
        Sequence(prompt, one, max_new, preempt_at=preempt_at)
        for prompt, one in zip(prompts, each, strict=True)
    ]
    MiniScheduler(executor).run(sequences, chunk)
    for sequence in sequences:
        assert sequence.error is None, sequence.error
    return [sequence.output for sequence in sequences]
