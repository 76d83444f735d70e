"""A GPU as the executor sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvern.errors import invalid
from kvern.v1.sampling_pb2 import TokenLogprobs
from kvern_worker.adapters.slots import AdapterSlots
from kvern_worker.gpu.graphs import DecodeGraphs
from kvern_worker.gpu.sampling import GpuSampler, GpuSamplingState, token_logprobs
from kvern_worker.gpu.staging import Staging
from kvern_worker.layers.attention import StepInputs
from kvern_worker.machine import available_memory
from kvern_worker.models.registry import Model
from kvern_worker.sampling import Sampled
from kvern_worker.sampling_state import SamplingState

Ints = npt.NDArray[np.int64]


class Gpu:
    """``place`` a GPU; or the CPU, where Triton's interpreter runs the same code (for tests). ``graphs`` are there once
    the model has been loaded, unless none are wanted. Steps that use ``adapters`` are in no graph."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.name = "cuda" if place.type == "cuda" else "triton interpreter"
        self.graphs: DecodeGraphs | None = None
        self.adapters: AdapterSlots | None = None
        self._staging = Staging(place)
        self._sampler = GpuSampler(place)

    def memory(self) -> tuple[int, int]:
        if self.place.type == "cuda":
            return torch.cuda.mem_get_info(self.place)
        free = available_memory()
        return free, free

    def forward(self, model: Model, step: StepInputs) -> Any:
        adapted = self.adapters is not None and self.adapters.plan is not None
        states = None if self.graphs is None or adapted else self.graphs.forward(step)
        return model.forward(self._staging.put_step(step)) if states is None else states

    def tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.place)

    def sampling_state(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> GpuSamplingState:
        return GpuSamplingState(max_num_seqs, vocab_size, eos_token_ids, self.place)

    def sample(self, logits: Tensor, slots: Ints, num_tokens: Ints, state: SamplingState) -> Sampled:
        assert isinstance(state, GpuSamplingState)
        return self._sampler.sample(logits, slots, num_tokens, state)

    def logprobs(self, logits: Tensor, token_ids: Ints, num_top: Ints) -> list[TokenLogprobs]:
        return token_logprobs(logits, token_ids, num_top)


def open_gpu() -> Gpu:
    """The first GPU that this process sees. Raises KvernError saying what is missing where there is none."""
    if torch.cuda.is_available():
        return Gpu(torch.device("cuda", torch.cuda.current_device()))
    if not torch.backends.cuda.is_built() and torch.version.hip is None:
        problem = (
            f"torch {torch.__version__} is built for CPUs only; install one with CUDA (`pip install torch`, from PyPI, on "
            "Linux), or for AMD GPUs one with ROCm"
        )
    else:
        problem = (
            "torch finds no GPU; see that `nvidia-smi` lists one, that its driver is as new as CUDA "
            f"{torch.version.cuda or torch.version.hip} needs, that CUDA_VISIBLE_DEVICES does not hide it, and that a "
            "container was started with --gpus"
        )
    raise invalid("device", f"--device cuda: {problem}; or use --device cpu", value="cuda")
