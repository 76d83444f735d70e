"""How many ranks a group has, and what each of them holds; no torch needed.

Ranks are numbered stage by stage: rank = stage · tensor_parallel_size + tensor rank (vLLM's order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvern.errors import KvernError, invalid
from kvern_worker.config import DecoderConfig, ModelConfig, unsupported

if TYPE_CHECKING:
    from kvern_worker.models.registry import ModelFile


@dataclass(frozen=True)
class Topology:
    """The sizes of one worker group, and where this process is in it.

    ``expert_parallel``: whole experts on each rank instead of a part of every expert; ``placement`` says which.
    """

    tensor: int = 1
    rank: int = 0
    expert_parallel: bool = False
    placement: str = "linear"

    @property
    def world(self) -> int:
        return self.tensor

    def check_model(self, config: ModelConfig, file: ModelFile) -> None:
        """Raises KvernError naming the flag where the model cannot be split so."""
        if self.world == 1:
            return
        kinds = getattr(file, "PARALLEL", ())
        if "tensor" not in kinds or not isinstance(config, DecoderConfig) or config.states is not None:
            raise _not_of(config, "tensor_parallel_size", self.tensor)
        if config.num_heads % self.tensor:
            raise _indivisible("attention heads", config.num_heads, self.tensor)
        if config.num_kv_heads % self.tensor and self.tensor % config.num_kv_heads:
            raise invalid(
                "tensor_parallel_size",
                f"--tensor-parallel-size {self.tensor}: {config.num_kv_heads} key heads are neither a multiple nor a "
                "divisor of it",
                value=self.tensor,
                limit=config.num_kv_heads,
            )
        for field in ("intermediate_size", "expert_size", "shared_size"):
            whole_experts = self.expert_parallel and field == "expert_size"
            if (size := getattr(config, field, 0)) % self.tensor and not whole_experts:
                raise _indivisible(f"features ({field})", size, self.tensor)
        routing = getattr(config, "routing", None)
        if self.expert_parallel and routing is None:
            raise invalid(
                "enable_expert_parallel",
                f"--enable-expert-parallel: {config.architecture} has no experts; leave the flag out",
                value=True,
            )


ALL_IN_ONE = Topology()


def part_of(total: int, size: int, rank: int, what: str = "outputs") -> slice:
    """The part of ``total`` that ``rank`` of ``size`` holds. Raises KvernError where they differ."""
    if total % size:
        raise _indivisible(what, total, size)
    each = total // size
    return slice(rank * each, (rank + 1) * each)


def placed_experts(num_experts: int, size: int, rank: int, placement: str) -> list[int]:
    """The experts of a rank, ascending. linear: as many as go, one after the other, the first ranks get one more;
    round_robin: expert e is rank e mod size's."""
    if placement == "round_robin":
        return list(range(rank, num_experts, size))
    each, more = divmod(num_experts, size)
    first = rank * each + min(rank, more)
    return list(range(first, first + each + (rank < more)))


def _indivisible(what: str, count: int, size: int) -> KvernError:
    return invalid(
        "tensor_parallel_size",
        f"--tensor-parallel-size {size} does not divide the {count} {what} of the model",
        value=size,
        limit=count,
    )


def _not_of(config: ModelConfig, field: str, value: int) -> KvernError:
    flag = field.replace("_", "-")
    return unsupported(
        f"--{flag} {value} is not supported for {config.architecture}; serve it with --{flag} 1",
        field=field,
        value=value,
    )
