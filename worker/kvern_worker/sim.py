"""A simulated executor: numpy only, the next token a pure function of the last one, its position and the seed.

It honours the contract of a real executor, so the scheduler cannot tell them apart. In strict mode it keeps a shadow
KV cache: per block slot, a hash of the whole prefix up to the token written there. Every step then checks that each
position it would attend to was written, by the same prefix, into the block table it was given, in the generation it
was told. A mistake in the scheduler's block accounting becomes a :class:`ShadowError` instead of plausible output.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvern.block_hash import split_hashes
from kvern.errors import invalid
from kvern.rpc.packing import pack_i32, pack_u32, unpack_i32, unpack_u32
from kvern.v1 import model_pb2, sampling_pb2, worker_pb2
from kvern_worker.step_profile import StepProfile, Work

I64 = npt.NDArray[np.int64]

_MULTIPLIER = 6364136223846793005
_MASK = 2**64 - 1


class ShadowError(Exception):
    """A plan would have read KV that is not what the sequence's tokens gave."""


@dataclass(frozen=True)
class SimConfig:
    """The model and pool that are pretended."""

    model_name: str = "sim"
    vocab_size: int = 32_000
    max_model_len: int = 8192
    eos_token_ids: tuple[int, ...] = (2,)
    num_blocks: int = 8192
    block_size: int = 16
    # Of a pretended hybrid: checkpoints of its states, and the tokens between them.
    num_state_blocks: int = 0
    state_block_size: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    step_us: int = 0
    # In place of ``step_us``: the time of a step by what it computes.
    profile: StepProfile | None = None
    # Simulated seconds in a second: below 1, many groups fit onto few cores.
    speed: float = 1.0
    sliding_window: int = 0
    # Of the tiers, in blocks.
    num_memory_blocks: int = 0
    num_disk_blocks: int = 0
    # Every so many of the blocks on disk turn out to be bad; 0: none.
    bad_disk_blocks: int = 0
    strict: bool = False
    max_loras: int = 0


def next_token(
    last: npt.ArrayLike, position: npt.ArrayLike, seed: npt.ArrayLike, config: SimConfig
) -> npt.NDArray[np.int32]:
    """The token at ``position`` after ``last``, never an end token. All arguments have shape [n]; ``seed`` is 0 for
    greedy sequences."""
    x = np.asarray(last, np.uint64) * np.uint64(2_654_435_761)
    x = x + np.asarray(position, np.uint64) * np.uint64(40_503) + np.asarray(seed, np.uint64)
    x ^= x >> np.uint64(15)
    x *= np.uint64(0x2C1B3C6D)
    x ^= x >> np.uint64(13)
    token = (x % np.uint64(config.vocab_size)).astype(np.int32)
    for eos in sorted(config.eos_token_ids):
        token = np.where(token == eos, (token + 1) % config.vocab_size, token).astype(np.int32)
    return token


def continue_greedily(token_ids: list[int], count: int, config: SimConfig, seed: int = 0) -> list[int]:
    """What the simulated model says after ``token_ids``: the oracle of tests."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(int(next_token([tokens[-1]], [len(tokens)], [seed], config)[0]))
    return tokens[len(token_ids) :]


def adapter_seed(path: str) -> int:
    """What a simulated adapter adds to the seed."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:6], "little")


Content = npt.NDArray[np.uint64]
"""What a shadow block holds."""


class SimTransfers:
    """The tiers as dictionaries. A transfer ends one step, or one heartbeat, after the one that began it, and copies what
    lies there only then: whoever touches its blocks meanwhile will see."""

    def __init__(self, config: SimConfig, shadow: _Shadow | None, disk: dict[bytes, Content] | None) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._config = config
        self._blocks = np.zeros((config.num_blocks, 1), np.uint64) if shadow is None else shadow.kv
        self.memory: dict[bytes, Content] = {}
        self.disk: dict[bytes, Content] = {} if disk is None else disk
        self._begun: list[worker_pb2.Transfer] = []
        self._due: list[worker_pb2.Transfer] = []

    def begin(self, transfers: Iterable[worker_pb2.Transfer]) -> None:
        self._due += self._begun
        self._begun = list(transfers)

    def reset(self) -> None:
        self._begun.clear()
        self._due.clear()

    def inventory(self) -> tuple[bytes, bytes]:
        return b"".join(self.memory), b"".join(self.disk)

    def take_done(self) -> list[worker_pb2.TransferDone]:
        due, self._due, self._begun = self._due, self._begun, []
        return [done for transfer in due if (done := self._do(transfer)) is not None]

    def _do(self, transfer: worker_pb2.Transfer) -> worker_pb2.TransferDone | None:
        hashes = split_hashes(transfer.hashes)
        blocks = unpack_u32(transfer.block_ids).tolist() or [0] * len(hashes)
        failed = [
            i
            for i, (h, b) in enumerate(zip(hashes, blocks, strict=True))
            if not self._move(transfer.kind, h, b)
        ]
        if not transfer.id:
            return None
        return worker_pb2.TransferDone(id=transfer.id, failed=pack_u32(failed))

    def _move(self, kind: worker_pb2.TransferKind.ValueType, block_hash: bytes, block: int) -> bool:
        memory, disk = self.memory, self.disk
        if kind == worker_pb2.TRANSFER_KIND_DROP:
            memory.pop(block_hash, None)
        elif kind == worker_pb2.TRANSFER_KIND_UNLINK:
            disk.pop(block_hash, None)
        elif kind == worker_pb2.TRANSFER_KIND_STORE:
            if len(memory) >= self._config.num_memory_blocks:
                raise ShadowError("more blocks are stored than the memory tier holds")
            memory[block_hash] = self._blocks[block].copy()
        elif kind == worker_pb2.TRANSFER_KIND_WRITE:
            if len(disk) >= self._config.num_disk_blocks:
                raise ShadowError("more blocks are written than the disk tier holds")
            if block_hash in memory:
                disk[block_hash] = memory[block_hash]
            return block_hash in memory
        else:
            if block_hash not in memory and self._is_bad(block_hash):
                disk.pop(block_hash, None)
            found = memory.get(block_hash, disk.get(block_hash))
            if found is not None:
                self._blocks[block] = found
            return found is not None
        return True

    def _is_bad(self, block_hash: bytes) -> bool:
        return bool(self._config.bad_disk_blocks) and block_hash[0] % self._config.bad_disk_blocks == 0


class SimExecutor:
    """See the module. Slot arrays have length ``max_num_seqs``."""

    def __init__(self, config: SimConfig, disk: dict[bytes, Content] | None = None) -> None:
        """``disk``: what an earlier process of this worker left."""
        self.config = config
        self.inline = config.step_us == 0 and config.profile is None
        self._generations = np.zeros(config.num_blocks, np.uint32)
        self._state_generations = np.zeros(config.num_state_blocks, np.uint32)
        slots = config.max_num_seqs
        self._active = np.zeros(slots, bool)
        self._last = np.zeros(slots, np.int64)
        self._num_tokens = np.zeros(slots, np.int64)
        self._num_computed = np.zeros(slots, np.int64)
        self._seed = np.zeros(slots, np.uint64)
        self._wants_logprobs = np.zeros(slots, bool)
        self.num_prefilled = 0
        # By adapter slot.
        self._adapters = np.zeros(config.max_loras, np.uint64)
        self._params: dict[int, tuple[sampling_pb2.SamplingParams, npt.NDArray[np.int32], int]] = {}
        self._shadow = _Shadow(config) if config.strict else None
        self.transfers = SimTransfers(config, self._shadow, disk) if config.num_memory_blocks else None

    def describe(self) -> worker_pb2.DescribeResponse:
        c = self.config
        return worker_pb2.DescribeResponse(
            model=model_pb2.ModelInfo(
                name=c.model_name,
                architecture="sim",
                dtype="float32",
                vocab_size=c.vocab_size,
                max_model_len=c.max_model_len,
                sliding_window=c.sliding_window,
                eos_token_ids=c.eos_token_ids,
                digest=hashlib.sha256(repr(c).encode()).digest(),
                state_block_size=c.state_block_size,
            ),
            num_blocks=c.num_blocks,
            block_size=c.block_size,
            bytes_per_block=4 * c.block_size,
            max_num_seqs=c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            device="sim",
            num_state_blocks=c.num_state_blocks,
            max_loras=c.max_loras,
            num_memory_blocks=c.num_memory_blocks,
            num_disk_blocks=c.num_disk_blocks,
        )

    def place_adapter(self, request: worker_pb2.PlaceAdapterRequest) -> worker_pb2.PlaceAdapterResponse:
        """Any existing path is an adapter, which changes what is said like another seed would."""
        if not Path(request.path).exists():
            raise invalid("lora_path", f"there is nothing at {request.path}", value=request.path)
        digest = hashlib.sha256(request.path.encode()).digest()
        if request.slot:
            self._adapters[request.slot - 1] = adapter_seed(request.path)
        return worker_pb2.PlaceAdapterResponse(digest=digest, rank=8)

    def generations(self) -> npt.NDArray[np.uint32]:
        return np.concatenate((self._generations, self._state_generations))

    def reset(self) -> None:
        self._active[:] = False
        self._params.clear()
        if self._shadow is not None:
            self._shadow.num_blocks[:] = 0
        if self.transfers is not None:
            self.transfers.reset()

    def run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        started = time.perf_counter()
        if plan.released_slots:
            self._active[unpack_u32(plan.released_slots)] = False
        for new in plan.new_sequences:
            self._enter(new)
        if plan.append_slots:
            blocks, generations = unpack_u32(plan.append_blocks), unpack_u32(plan.append_generations)
            self._generations[blocks] = generations
            if self._shadow is not None:
                self._shadow.append(unpack_u32(plan.append_slots), blocks, generations)
        if self._shadow is not None and plan.copy_sources:
            self._shadow.copy(unpack_u32(plan.copy_sources), unpack_u32(plan.copy_targets))
        if self.transfers is not None:
            for transfer in plan.transfers:
                if transfer.kind == worker_pb2.TRANSFER_KIND_LOAD:
                    generations = unpack_u32(transfer.block_generations)
                    self._generations[unpack_u32(transfer.block_ids)] = generations
            self.transfers.begin(plan.transfers)
        result = worker_pb2.StepResult(epoch=plan.epoch, step=plan.step)
        prefilled = self._prefill(plan, result) if plan.prefill_slots else None
        decoded = unpack_u32(plan.decode_slots)
        if prefilled is not None:
            decoded = np.concatenate([prefilled, decoded])
        if decoded.size:
            self._sample(plan, decoded, 0 if prefilled is None else prefilled.size, result)
        if plan.save_slots:
            blocks = unpack_u32(plan.save_state_blocks)
            self._state_generations[blocks] = unpack_u32(plan.save_state_generations)
            if self._shadow is not None:
                self._shadow.checkpoints[blocks] = self._shadow.states[unpack_u32(plan.save_slots)]
        self._pretend_to_work(started, plan)
        result.forward_us = int((time.perf_counter() - started) * 1e6)
        return result

    def _enter(self, new: worker_pb2.NewSequence) -> None:
        slot = new.slot
        if self._active[slot]:
            raise invalid("slot", f"slot {slot} is taken: a sequence enters a free slot")
        tokens = unpack_i32(new.token_ids)
        params = new.params
        self._active[slot] = True
        self._num_tokens[slot] = tokens.size
        self._num_computed[slot] = new.num_computed_tokens
        self._last[slot] = tokens[-1]
        self._seed[slot] = params.seed if params.temperature > 0 else 0
        if new.adapter_slot:
            self._seed[slot] ^= self._adapters[new.adapter_slot - 1]
        self._wants_logprobs[slot] = params.HasField("logprobs")
        self._params.pop(slot, None)
        if params.HasField("logprobs") or params.HasField("prompt_logprobs"):
            self._params[slot] = (params, tokens, new.num_prompt_tokens)
        blocks, generations = unpack_u32(new.block_ids), unpack_u32(new.block_generations)
        if self._shadow is not None:
            computed_blocks = -(-new.num_computed_tokens // self.config.block_size)
            root = 1 + int(self._adapters[new.adapter_slot - 1]) if new.adapter_slot else 1
            self._shadow.enter(slot, tokens, blocks, generations, computed_blocks, self._generations, root)
            self._shadow.restore(slot, new.state_block if new.HasField("state_block") else None)
        self._generations[blocks] = generations

    def _prefill(self, plan: worker_pb2.StepPlan, result: worker_pb2.StepResult) -> npt.NDArray[np.uint32]:
        """Runs the chunks; returns the slots that reached the end of their known tokens."""
        slots, lengths = unpack_u32(plan.prefill_slots), unpack_u32(plan.prefill_lengths).astype(np.int64)
        self._require_active(slots)
        self.num_prefilled += int(lengths.sum())
        starts = self._num_computed[slots]
        ends = starts + lengths
        if (ends > self._num_tokens[slots]).any():
            raise invalid("prefill_lengths", f"step {plan.step}: a chunk ends beyond the slot's known tokens")
        if self._shadow is not None:
            for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
                self._shadow.compute(slot, start, end, self._generations)
        self._num_computed[slots] = ends
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if slot in self._params and self._params[slot][0].HasField("prompt_logprobs"):
                self._report_prompt(slot, start, end, result)
        return slots[ends == self._num_tokens[slots]]

    def _sample(
        self,
        plan: worker_pb2.StepPlan,
        slots: npt.NDArray[np.uint32],
        num_prefilled: int,
        result: worker_pb2.StepResult,
    ) -> None:
        decoding = slots[num_prefilled:]
        if decoding.size:
            self._require_active(decoding)
            known = self._num_tokens[decoding]
            if (self._num_computed[decoding] != known - 1).any():
                raise invalid(
                    "decode_slots", f"step {plan.step}: a slot in decode has tokens left to prefill"
                )
            if self._shadow is not None:
                for slot, end in zip(decoding.tolist(), known.tolist(), strict=True):
                    self._shadow.compute(slot, end - 1, end, self._generations)
            self._num_computed[decoding] = known
        positions = self._num_tokens[slots]
        tokens = next_token(self._last[slots], positions, self._seed[slots], self.config)
        self._last[slots] = tokens
        self._num_tokens[slots] = positions + 1
        if self._shadow is not None:
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                self._shadow.extend(slot, token)
        result.slots = pack_u32(slots)
        result.token_ids = pack_i32(tokens)
        asked = np.flatnonzero(self._wants_logprobs[slots])
        for index in asked.tolist():
            entry = self._logprobs_of(int(slots[index]), result)
            entry.sampled.CopyFrom(
                self._logprob(int(tokens[index]), self._params[int(slots[index])][0].logprobs)
            )

    def _require_active(self, slots: npt.NDArray[np.uint32]) -> None:
        if not self._active[slots].all():
            raise invalid("slots", "a slot to compute is empty")

    def _logprobs_of(self, slot: int, result: worker_pb2.StepResult) -> worker_pb2.SlotLogprobs:
        for entry in result.logprobs:
            if entry.slot == slot:
                return entry
        return result.logprobs.add(slot=slot)

    def _report_prompt(self, slot: int, start: int, end: int, result: worker_pb2.StepResult) -> None:
        params, tokens, num_prompt = self._params[slot]
        first, last = max(start, 1), min(end, num_prompt)
        if first < last:
            entry = self._logprobs_of(slot, result)
            entry.first_prompt_index = first
            entry.prompt.extend(
                self._logprob(int(t), params.prompt_logprobs) for t in tokens[first:last].tolist()
            )

    def _logprob(self, token: int, count: int) -> sampling_pb2.TokenLogprobs:
        """The sampled token is always the likeliest, at −0.5; each next one costs 1 more."""
        ids = [(token + i) % self.config.vocab_size for i in range(count)]
        return sampling_pb2.TokenLogprobs(
            token_id=token,
            logprob=-0.5,
            rank=1,
            top_token_ids=ids,
            top_logprobs=[-0.5 - i for i in range(count)],
        )

    def _pretend_to_work(self, started: float, plan: worker_pb2.StepPlan) -> None:
        profile = self.config.profile
        step_us = self.config.step_us if profile is None else profile.us(self._work(plan))
        left = step_us / 1e6 / self.config.speed - (time.perf_counter() - started)
        if left > 0:
            time.sleep(left)

    def _work(self, plan: worker_pb2.StepPlan) -> Work:
        """What the step has just computed."""
        prefilled, decoded = unpack_u32(plan.prefill_slots), unpack_u32(plan.decode_slots)
        ends = self._num_computed[prefilled]
        starts = ends - unpack_u32(plan.prefill_lengths).astype(np.int64)
        return Work.of(starts, ends, self._num_computed[decoded])


class _Shadow:
    """What a KV cache would hold: per block and offset, the hash of the prefix that ends there (0: nothing)."""

    def __init__(self, config: SimConfig) -> None:
        self.block_size = config.block_size
        self.kv = np.zeros((config.num_blocks, config.block_size), np.uint64)
        max_blocks = -(-config.max_model_len // config.block_size) + 1
        self.table = np.zeros((config.max_num_seqs, max_blocks), np.uint32)
        self.table_generations = np.zeros((config.max_num_seqs, max_blocks), np.uint32)
        self.num_blocks = np.zeros(config.max_num_seqs, np.int64)
        self.prefix: dict[int, list[int]] = {}
        # Of a hybrid: the prefix that each slot's state, and each checkpoint, has taken in.
        self.window = config.sliding_window or config.max_model_len
        self.is_hybrid = config.state_block_size > 0
        self.states = np.zeros(config.max_num_seqs, np.uint64)
        self.checkpoints = np.zeros(config.num_state_blocks, np.uint64)

    def enter(
        self,
        slot: int,
        tokens: npt.NDArray[np.int32],
        blocks: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
        computed_blocks: int,
        held: npt.NDArray[np.uint32],
        root: int,
    ) -> None:
        shared, fresh = blocks[:computed_blocks], blocks[computed_blocks:]
        if (held[shared] != generations[:computed_blocks]).any():
            raise ShadowError(f"slot {slot}: a cached block no longer has the generation of the plan")
        self.kv[fresh] = 0
        self.table[slot, : blocks.size] = blocks
        self.table_generations[slot, : blocks.size] = generations
        self.num_blocks[slot] = blocks.size
        prefix, hashes = root, []
        for token in tokens.tolist():
            prefix = (prefix * _MULTIPLIER + token + 1) & _MASK
            hashes.append(prefix)
        self.prefix[slot] = hashes

    def restore(self, slot: int, checkpoint: int | None) -> None:
        self.states[slot] = 0 if checkpoint is None else self.checkpoints[checkpoint]

    def extend(self, slot: int, token: int) -> None:
        hashes = self.prefix[slot]
        hashes.append((hashes[-1] * _MULTIPLIER + token + 1) & _MASK)

    def append(
        self,
        slots: npt.NDArray[np.uint32],
        blocks: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
    ) -> None:
        for slot, block, generation in zip(
            slots.tolist(), blocks.tolist(), generations.tolist(), strict=True
        ):
            index = self.num_blocks[slot]
            self.table[slot, index] = block
            self.table_generations[slot, index] = generation
            self.num_blocks[slot] = index + 1
        self.kv[blocks] = 0

    def copy(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        self.kv[targets] = self.kv[sources]

    def compute(self, slot: int, start: int, end: int, held: npt.NDArray[np.uint32]) -> None:
        """Writes positions start … end − 1, after checking that all before them, in the window, are what they must be."""
        size = self.block_size
        needed = -(-end // size)
        if needed > self.num_blocks[slot]:
            raise ShadowError(f"slot {slot}: position {end - 1} has no block")
        blocks = self.table[slot, :needed]
        seen = max(0, start - self.window + 1)
        if (held[blocks] != self.table_generations[slot, :needed])[seen // size :].any():
            raise ShadowError(f"slot {slot}: a block of its table was handed out again")
        hashes = np.array(self.prefix[slot][:end], np.uint64)
        keys = self.kv[blocks].reshape(-1)
        if (keys[seen:start] != hashes[seen:start]).any():
            wrong = seen + int(np.flatnonzero(keys[seen:start] != hashes[seen:start])[0])
            raise ShadowError(f"slot {slot}: position {wrong} holds another prefix's KV")
        if self.is_hybrid and self.states[slot] != (hashes[start - 1] if start else 0):
            raise ShadowError(f"slot {slot}: its state is not the one after {start} tokens")
        self.states[slot] = hashes[-1]
        positions = np.arange(start, end)
        self.kv[blocks[positions // size], positions % size] = hashes[start:end]
