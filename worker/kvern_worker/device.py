"""Where a model runs, as the executor sees it: what differs between a CPU and a GPU, and nothing else."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvern.v1.sampling_pb2 import TokenLogprobs
from kvern_worker.layers.attention import StepInputs
from kvern_worker.logprobs import token_logprobs
from kvern_worker.machine import available_memory
from kvern_worker.models.registry import Model
from kvern_worker.sampling import Sampled, sample
from kvern_worker.sampling_state import SamplingState

Ints = npt.NDArray[np.int64]


class Device(Protocol):
    """``name`` is what Describe reports; ``place`` is where weights and cache lie."""

    name: str
    place: torch.device

    def memory(self) -> tuple[int, int]:
        """Bytes that are free on ``place``, and of them and others all that there are to share out."""
        ...

    def forward(self, model: Model, step: StepInputs) -> Any:
        """Runs the layers on ``step``, whose tensors are the host's; what comes back is for ``model.logits``."""
        ...

    def tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A small array of the host, for an operation on ``place``."""
        ...

    def sampling_state(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> SamplingState:
        """What :meth:`sample` takes."""
        ...

    def sample(self, logits: Tensor, slots: Ints, num_tokens: Ints, state: SamplingState) -> Sampled:
        """See sampling.sample; ``logits`` [rows, vocab] float32 lie on ``place``."""
        ...

    def logprobs(self, logits: Tensor, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
        """See logprobs.token_logprobs."""
        ...


class Host:
    """The CPU: tensors are numpy's own memory."""

    name = "cpu"
    place = torch.device("cpu")

    def memory(self) -> tuple[int, int]:
        free = available_memory()
        return free, free

    def forward(self, model: Model, step: StepInputs) -> Any:
        return model.forward(step)

    def tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array)

    def sampling_state(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> SamplingState:
        return SamplingState(max_num_seqs, vocab_size, eos_token_ids)

    def sample(self, logits: Tensor, slots: Ints, num_tokens: Ints, state: SamplingState) -> Sampled:
        return sample(logits.numpy(), slots, num_tokens, state)

    def logprobs(self, logits: Tensor, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
        return token_logprobs(logits.numpy(), token_ids, num_top)
