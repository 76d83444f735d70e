"""Requests and their sequences (choices).

::

    submit ─▶ WAITING ─admit─▶ RUNNING ─▶ FINISHED
                 ▲                │
                 └──preempt, ─────┘   (outputs kept, recomputed later)
                    worker lost
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import abc
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvern.block_hash import Image, extend_hashes, extra_keys
from kvern.errors import KvernError
from kvern.v1 import media_pb2, sampling_pb2
from kvern_scheduler.core.journal import Event

MAX_CHOICES = 128
CHOICE_BITS = 7


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class Submission:
    """A request as it comes in: already converted, not yet validated."""

    request_id: str
    tenant: str
    body_digest: bytes
    prompt: npt.NDArray[np.int32]
    params: sampling_pb2.SamplingParams
    n: int = 1
    hashes: list[bytes] = field(default_factory=list)
    cache_salt: str = ""
    priority: int = 0
    deadline: float = 0.0
    """Unix seconds; 0: none."""
    resumable: bool = False
    model: str = ""
    gateway_context: bytes = b""
    adapter: int = 0
    """The number of its LoRA adapter; 0: none."""
    lora: tuple[str, str] | None = None
    """What block hashes are keyed with for it (kvern.block_hash.adapter_keys)."""
    traceparent: str = ""
    pooling: bool = False
    """Asks for an embedding; ``params.max_tokens`` is 0."""
    media: abc.Sequence[media_pb2.MediaItem] = ()
    """Images of the prompt, in order of their offsets."""
    images: abc.Sequence[Image] = ()
    """What block hashes are keyed with for them."""


@dataclass(slots=True)
class Finish:
    """How a sequence ended."""

    reason: sampling_pb2.FinishReason.ValueType
    num_output_tokens: int
    stop_token_id: int | None = None
    error: KvernError | None = None
    embedding: bytes = b""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    e2e_seconds: float = 0.0


class Request:
    """One submission, alive until its last choice has finished and its retention is over."""

    __slots__ = (
        "arrived",
        "claim",
        "num_uncommitted",
        "num_unfinished",
        "rid",
        "sequences",
        "submission",
        "waiting_siblings",
    )

    def __init__(self, rid: int, submission: Submission, arrived: float) -> None:
        self.rid = rid
        self.submission = submission
        self.arrived = arrived
        # The number of the newest call that asked for it.
        self.claim = 0
        self.sequences = [Sequence(self, choice) for choice in range(submission.n)]
        self.num_unfinished = submission.n
        # Choices whose end has not gone into a commit yet.
        self.num_uncommitted = submission.n
        # Choices 1 and on wait until choice 0 has put the prompt into the prefix cache.
        self.waiting_siblings: list[Sequence] = []

    @property
    def key(self) -> tuple[str, str]:
        return self.submission.tenant, self.submission.request_id


class Sequence:
    """One choice of a request. While it runs, its newest tokens and its blocks are in the batch's arrays."""

    __slots__ = (
        "announced",
        "attempts",
        "choice",
        "finish",
        "first_scheduled",
        "first_token",
        "group",
        "hashes",
        "logprobs",
        "max_len",
        "num_cached_tokens",
        "num_loads",
        "num_losses",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_tokens_at_loss",
        "output",
        "request",
        "row",
        "seq_no",
        "slot",
        "state",
        "trail",
    )

    def __init__(self, request: Request, choice: int) -> None:
        params = request.submission.params
        self.request = request
        self.choice = choice
        self.seq_no = request.rid << CHOICE_BITS | choice
        self.row = -1
        self.state = State.WAITING
        self.slot = -1
        self.group: object = None
        self.output = array("i")
        self.hashes = list(request.submission.hashes)
        # An embedding stands where the first token would.
        self.max_len = request.submission.prompt.size + max(1, params.max_tokens)
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        # Times that it has waited for blocks from a tier, since it last had a slot.
        self.num_loads = 0
        # Workers lost while computing this sequence, since it last got a token.
        self.num_losses = 0
        self.num_tokens_at_loss = -1
        self.attempts = 0
        # Index of the first prompt token whose log-probabilities nobody has been told.
        self.num_prompt_logprobs = 1
        # Committed ones, for gateways that attach later; a list of changes.Logprobs.
        # Committed; records of kvern_scheduler.convert.pack_logprobs.
        self.logprobs = bytearray()
        self.first_scheduled = 0.0
        self.first_token = 0.0
        self.finish: Finish | None = None
        # What the journal keeps of it; None: nothing.
        self.trail: list[Event] | None = None
        # The end is committed, so gateways may know of it.
        self.announced = False

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: the smallest runs first and is preempted last."""
        return self.request.submission.priority, self.seq_no

    @property
    def num_prompt(self) -> int:
        return self.request.submission.prompt.size

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far. While running, the batch knows better."""
        return self.num_prompt + len(self.output)

    def tokens(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int32]:
        """Of prompt and output so far, the positions from ``start`` to before ``end``."""
        prompt = self.request.submission.prompt
        output = self.output[max(0, start - prompt.size) : None if end is None else max(0, end - prompt.size)]
        return np.concatenate([prompt[start:end], np.array(output, np.int32)])

    def extra_keys(self, block: int, size: int) -> bytes:
        """What the hash of a block that is not the first depends on besides tokens."""
        submission = self.request.submission
        return extra_keys(submission.lora, "", submission.images, block * size, size)

    def extend_hashes(self, num_blocks: int, size: int) -> None:
        """Completes the hashes of the first ``num_blocks`` blocks, whose tokens are in the log."""
        start, end = len(self.hashes) * size, num_blocks * size
        if start < end:
            of = self.request.submission
            extend_hashes(self.hashes, self.tokens(start, end), size, of.cache_salt, of.lora, of.images)


def sequence_seed(request_seed: int, choice: int) -> int:
    """The seed of a choice: choice 0 keeps the request's, the others get independent ones. Pure, 64 bits."""
    if choice == 0:
        return request_seed
    packed = request_seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"kvern-choice").digest(), "little")
