"""What must be true, whatever fails: checked at every commit, every message to a gateway, every token that a client
gets, and at the end.

The simulated model's next token is a pure function of the tokens before, so the fault-free output of every request is
known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvern.rpc.packing import unpack_i32, unpack_u32
from kvern.v1 import error_pb2, sampling_pb2, session_pb2
from kvern_scheduler.core.requests import sequence_seed
from kvern_scheduler.store.base import CommitStatus, Delta, split_seq_no

_MASK = 2**64 - 1
STOP, LENGTH, ABORT, ERROR = (
    sampling_pb2.FINISH_REASON_STOP,
    sampling_pb2.FINISH_REASON_LENGTH,
    sampling_pb2.FINISH_REASON_ABORT,
    sampling_pb2.FINISH_REASON_ERROR,
)


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Spec:
    """A request, and what becomes of it where nothing fails. ``outputs``: by choice."""

    request_id: str
    prompt: list[int]
    params: sampling_pb2.SamplingParams
    n: int
    priority: int
    resumable: bool
    outputs: list[list[int]]
    cancels: bool = False
    deadline: float = 0.0
    """Unix seconds; 0: none."""


@dataclass
class Stored:
    """A request as the commits have it."""

    spec: Spec
    tokens: list[list[int]]
    finishes: list[session_pb2.Finished | None]
    rid: int = 0


def model_output(
    prompt: list[int], params: sampling_pb2.SamplingParams, choice: int, vocab_size: int
) -> list[int]:
    """All that the simulated model says: up to a stop token or max_tokens. End token 2 is never sampled."""
    seed = sequence_seed(params.seed, choice) if params.temperature > 0 else 0
    last, output = prompt[-1], []
    for position in range(len(prompt), len(prompt) + params.max_tokens):
        x = (last * 2_654_435_761 + position * 40_503 + seed) & _MASK
        x ^= x >> 15
        x = (x * 0x2C1B3C6D) & _MASK
        x ^= x >> 13
        last = x % vocab_size
        if last == 2:
            last = 3
        output.append(last)
        if last in params.stop_token_ids:
            break
    return output


class Oracle:
    """Raises nothing while the simulation runs (what it would pass through is being tested); ``violations`` grows."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self.violations: list[str] = []
        self.specs: dict[str, Spec] = {}
        self.stored: dict[str, Stored] = {}
        self.num_committed_tokens = 0
        self.num_fenced = 0
        self.num_leaders = 0
        self.blames_workers = False
        """So many workers were lost that a request may be taken for the cause."""
        self.forgets = False
        """Requests that nobody asks about are aborted, and those that ended are forgotten, within moments."""
        self._note = note
        self._by_rid: dict[int, Stored] = {}
        self._epoch = self._step = 0
        self._worker_epochs: dict[str, int] = {}

    def violated(self, what: str) -> None:
        if len(self.violations) < 20:
            self.violations.append(what)
        self._note("ORACLE", f"VIOLATION: {what}")

    # -- the store ----------------------------------------------------------------------------------------------

    def acquired(self, epoch: int) -> None:
        """The store gave the leadership to someone."""
        if epoch <= self._epoch:
            self.violated(f"epoch {epoch} was given out after epoch {self._epoch}")
        self._epoch = epoch
        self.num_leaders += 1

    def committed(self, epoch: int, step: int, delta: Delta, status: CommitStatus) -> None:
        """The store answered a commit with ``status``."""
        if status is CommitStatus.FENCED:
            self.num_fenced += 1
        if status is not CommitStatus.OK:
            self._note("store", f"commit {step} of epoch {epoch}: {status.name}")
            return
        if epoch != self._epoch:
            self.violated(f"epoch {epoch} committed step {step}, while epoch {self._epoch} leads")
        if step != self._step + 1:
            self.violated(f"step {step} was committed after step {self._step}")
        self._step = step
        self._note(
            "store",
            f"commit {step} of epoch {epoch}: {len(delta.requests)} requests, {delta.tokens.size} tokens, "
            f"{len(delta.finished)} ends",
        )
        for rid, record in delta.requests:
            self._enter(rid, record)
        start = 0
        tokens = delta.tokens.tolist()
        for seq_no, count in zip(delta.seq_nos.tolist(), delta.counts.tolist(), strict=True):
            self._append(seq_no, tokens[start : start + count])
            start += count
        for finish in delta.finished:
            self._finish(finish.seq_no, finish.record)

    def _enter(self, rid: int, record: bytes) -> None:
        submit = session_pb2.Submit.FromString(record)
        spec = self.specs[submit.request_id]
        if rid in self._by_rid or (spec.resumable and submit.request_id in self.stored and not self.forgets):
            self.violated(f"request {submit.request_id} was admitted twice")
        stored = Stored(spec, [[] for _ in range(spec.n)], [None] * spec.n, rid)
        self.stored[submit.request_id] = self._by_rid[rid] = stored

    def _append(self, seq_no: int, tokens: list[int]) -> None:
        rid, choice = split_seq_no(seq_no)
        stored = self._by_rid.get(rid)
        if stored is None:
            self.violated(f"tokens of request number {rid}, which is not in the store")
            return
        log, expected = stored.tokens[choice], stored.spec.outputs[choice]
        if tokens != expected[len(log) : len(log) + len(tokens)]:
            self.violated(f"{stored.spec.request_id}.{choice}: {tokens} committed at index {len(log)}")
        if stored.finishes[choice] is not None:
            self.violated(f"{stored.spec.request_id}.{choice}: tokens committed after the end")
        log += tokens
        self.num_committed_tokens += len(tokens)

    def _finish(self, seq_no: int, record: bytes) -> None:
        rid, choice = split_seq_no(seq_no)
        stored = self._by_rid.get(rid)
        if stored is None:
            self.violated(f"an end of request number {rid}, which is not in the store")
            return
        name = f"{stored.spec.request_id}.{choice}"
        finish = session_pb2.Finished.FromString(record)
        if stored.finishes[choice] is not None:
            self.violated(f"{name}: ended twice")
        stored.finishes[choice] = finish
        if finish.num_output_tokens != len(stored.tokens[choice]):
            self.violated(
                f"{name}: its end counts {finish.num_output_tokens} tokens, {len(stored.tokens[choice])} are committed"
            )

    # -- workers ------------------------------------------------------------------------------------------------

    def ran(self, worker: str, epoch: int) -> None:
        """A worker computes a plan of ``epoch``."""
        if epoch < self._worker_epochs.get(worker, 0):
            self.violated(
                f"{worker} computed a plan of epoch {epoch} after one of {self._worker_epochs[worker]}"
            )
        self._worker_epochs[worker] = epoch

    # -- sessions -----------------------------------------------------------------------------------------------

    def requested(self, stream: Any, message: session_pb2.SessionRequest) -> None:
        """Learns which handle is whose."""
        if not hasattr(stream, "handles"):
            stream.handles = {}
        for submit in message.submits:
            for choice in range(submit.n):
                stream.handles[submit.handle + choice] = submit.request_id, choice
        for attach in message.attaches:
            for choice in range(self.specs[attach.request_id].n):
                stream.handles[attach.handle + choice] = attach.request_id, choice

    def exposed(self, stream: Any, message: session_pb2.SessionResponse) -> None:
        """A scheduler says something to a gateway: all of it must be committed."""
        for admitted in message.admitted:
            if admitted.request_id not in self.stored:
                self.violated(f"{admitted.request_id} is shown as admitted, and is not committed")
        if message.token_handles:
            for handle, index, token in zip(
                unpack_u32(message.token_handles).tolist(),
                unpack_u32(message.token_indexes).tolist(),
                unpack_i32(message.token_ids).tolist(),
                strict=True,
            ):
                name, choice = stream.handles[handle]
                stored = self.stored.get(name)
                if stored is None or index >= len(stored.tokens[choice]):
                    self.violated(f"{name}.{choice}: token {index} is shown, and is not committed")
                elif stored.tokens[choice][index] != token:
                    self.violated(
                        f"{name}.{choice}: token {index} is shown as another than the committed one"
                    )
        for finished in message.finished:
            name, choice = stream.handles[finished.handle]
            stored = self.stored.get(name)
            if stored is None or stored.finishes[choice] is None:
                self.violated(f"{name}.{choice}: its end is shown, and is not committed")

    # -- clients ------------------------------------------------------------------------------------------------

    def check_finish(self, spec: Spec, choice: int, finish: session_pb2.Finished, now: float) -> None:
        """Whether this end is one that the request may have."""
        name, expected = f"{spec.request_id}.{choice}", spec.outputs[choice]
        complete = finish.num_output_tokens == len(expected)
        stopped = expected[-1] in spec.params.stop_token_ids
        if finish.reason == STOP and spec.cancels:
            return  # the client found a stop string
        if finish.reason in (STOP, LENGTH):
            if not complete or finish.reason != (STOP if stopped else LENGTH):
                self.violated(f"{name}: ended with {finish.num_output_tokens} tokens of {len(expected)}")
        elif finish.reason == ABORT:
            if not spec.cancels and spec.resumable and not self.forgets:
                self.violated(f"{name}: aborted, and nobody asked for it")
        elif finish.error.code == error_pb2.ERROR_CODE_DEADLINE_EXCEEDED:
            if not spec.deadline or now < spec.deadline:
                self.violated(f"{name}: ended by a deadline that has not passed")
        elif not (self.blames_workers and "workers in a row" in finish.error.message):
            self.violated(f"{name}: ended with an error: {finish.error.message}")
