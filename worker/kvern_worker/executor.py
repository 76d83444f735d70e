"""One rank's model behind the worker service: plan in, result out."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvern.errors import KvernError
from kvern.rpc.packing import pack_i32, pack_u32, unpack_u32
from kvern.v1 import error_pb2, model_pb2, worker_pb2
from kvern_worker.adapters.library import AdapterLibrary
from kvern_worker.batch import PersistentBatch, PlanError, Rows, plan_error
from kvern_worker.device import Device, Host
from kvern_worker.images import BatchImages, no_images
from kvern_worker.layers.attention import KvCache
from kvern_worker.models.registry import Model
from kvern_worker.pooling import PoolingConfig, pool
from kvern_worker.tiers.transfers import TierTransfers

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """What the scheduler may ask for. ``bytes_per_block`` is over all layers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    bytes_per_block: int
    # Of the tiers below the device.
    num_memory_blocks: int = 0
    num_disk_blocks: int = 0


class ModelExecutor:
    """Runs plans in order, from one thread. See :class:`kvern_worker.service.Executor`.

    ``weight_bytes``: what a step that runs every weight reads of them; 0 where that is not known.
    """

    inline = False

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        info: model_pb2.ModelInfo,
        limits: Limits,
        threads: int,
        pooling: PoolingConfig | None = None,
        adapters: AdapterLibrary | None = None,
        weight_bytes: int = 0,
        device: Device | None = None,
        images: BatchImages | None = None,
        transfers: TierTransfers | None = None,
        *,
        held_bytes: int = 0,
    ) -> None:
        """``pooling``: sequences end with an embedding instead of tokens. ``device``: the CPU by default. ``images``: of
        a model that takes them. ``transfers``: to the tiers below the device. ``held_bytes``: all
        weights of this rank."""
        self._held_bytes = held_bytes
        self._device = device or Host()
        self.transfers = transfers
        self._pooling = pooling
        self.weight_bytes = weight_bytes
        self._model = model
        self._cache = cache
        self._info = info
        self._limits = limits
        self._threads = threads
        self._adapters = adapters
        self._images = images
        self._computing_thread = 0
        self._batch = PersistentBatch(
            limits.max_num_seqs, limits.max_model_len, cache.block_size, cache.num_blocks, info.vocab_size
        )
        self._state_generations = np.zeros(cache.num_checkpoints, np.uint32)
        self._sampling = self._device.sampling_state(
            limits.max_num_seqs, info.vocab_size, tuple(info.eos_token_ids)
        )

    def describe(self) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            model=self._info,
            num_blocks=self._cache.num_blocks,
            block_size=self._cache.block_size,
            bytes_per_block=self._limits.bytes_per_block,
            max_num_seqs=self._limits.max_num_seqs,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            device=self._device.name,
            weight_bytes=self._held_bytes,
            num_state_blocks=self._cache.num_checkpoints,
            max_loras=0 if self._adapters is None else self._adapters.slots.num_slots,
            num_memory_blocks=self._limits.num_memory_blocks,
            num_disk_blocks=self._limits.num_disk_blocks,
        )

    def place_adapter(self, request: worker_pb2.PlaceAdapterRequest) -> worker_pb2.PlaceAdapterResponse:
        """Beside the steps, from another thread than :meth:`run`'s."""
        if self._adapters is None:
            raise no_adapters()
        adapter = self._adapters.load(
            request.path, request.digest, request.slot - 1 if request.slot else None
        )
        return worker_pb2.PlaceAdapterResponse(digest=adapter.digest, rank=adapter.rank)

    def generations(self) -> npt.NDArray[np.uint32]:
        return np.concatenate((self._batch.generations, self._state_generations))

    def reset(self) -> None:
        self._batch.reset()
        self._sampling.reset()
        if self._images is not None:
            self._images.clear()
        if self.transfers is not None:
            self.transfers.reset()

    @torch.inference_mode()
    def run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        """One step. Raises KvernError when the plan is malformed; a sequence at fault is reported in the result."""
        if self._computing_thread != threading.get_ident():
            # OpenMP keeps the number of threads per calling thread.
            torch.set_num_threads(self._threads)
            self._computing_thread = threading.get_ident()
        started = time.perf_counter()
        result = worker_pb2.StepResult(epoch=plan.epoch, step=plan.step)
        rows = self._apply(plan, result)
        if not len(rows.slots):
            self._save_states(plan)
            return result
        step = self._batch.prepare(rows)
        if self._adapters is not None:
            self._adapters.slots.begin(self._batch.adapter[rows.slots], rows.lengths)
        if self._images is not None:
            self._images.begin(rows, step)
            result.num_images, result.num_images_cached = self._images.num_used, self._images.num_cached
        prepared = time.perf_counter()
        states = self._device.forward(self._model, step)
        if self._pooling is not None:
            self._pool(self._pooling, rows, states, result)
            self._batch.advance(rows)
            result.prepare_us = int((prepared - started) * 1e6)
            result.forward_us = int((time.perf_counter() - prepared) * 1e6)
            return result
        logits = self._logits(rows, states)
        forwarded = time.perf_counter()
        prompt = self._prompt_logprobs(rows, states, result)
        self._batch.advance(rows)
        self._save_states(plan)
        if logits is not None:
            slots = rows.slots[rows.samples]
            fine = ~self._batch.failed[slots]
            self._sample(slots[fine], logits if fine.all() else logits[fine], prompt, result)
        result.logprobs.extend(prompt.values())
        finished = time.perf_counter()
        result.prepare_us = int((prepared - started) * 1e6)
        result.forward_us = int((forwarded - prepared) * 1e6)
        result.sample_us = int((finished - forwarded) * 1e6)
        return result

    def _apply(self, plan: worker_pb2.StepPlan, result: worker_pb2.StepResult) -> Rows:
        """Brings the batch up to the plan; reports sequences that cannot run and returns the rows that can."""
        batch = self._batch
        released = unpack_u32(plan.released_slots)
        if len(released):
            if released.max() >= self._limits.max_num_seqs:
                raise plan_error(
                    "released_slots", f"slot {released.max()} is not below {self._limits.max_num_seqs}"
                )
            batch.release(released)
            self._sampling.release(released)
            if self._images is not None:
                self._images.release(released)
        for new in plan.new_sequences:
            if new.slot >= self._limits.max_num_seqs:
                raise plan_error("new_sequences", f"slot {new.slot} is not below {self._limits.max_num_seqs}")
            if new.adapter_slot > (0 if self._adapters is None else self._adapters.slots.num_slots):
                raise plan_error("new_sequences", f"there is no adapter slot {new.adapter_slot}")
            try:
                batch.add(new)
                self._restore_state(new)
                self._add_images(new)
                tokens = batch.tokens[new.slot, : batch.num_tokens[new.slot]]
                self._sampling.add(new.slot, new.params, tokens, new.num_prompt_tokens)
            except PlanError:
                raise
            except KvernError as error:
                self._fail(new.slot, error, result)
        batch.append_blocks(plan)
        self._copy_blocks(plan)
        self._begin_transfers(plan)
        rows, failures = batch.rows(plan)
        for slot, failure in failures:
            self._fail(slot, failure, result)
        if rows.lengths.sum() > self._limits.max_num_batched_tokens:
            raise plan_error(
                "prefill_lengths",
                f"{rows.lengths.sum()} tokens in one step, the limit is {self._limits.max_num_batched_tokens}",
            )
        return rows

    def _copy_blocks(self, plan: worker_pb2.StepPlan) -> None:
        if not plan.copy_sources:
            return
        sources, targets = unpack_u32(plan.copy_sources), unpack_u32(plan.copy_targets)
        if len(sources) != len(targets):
            raise plan_error("copy_targets", "copy_sources and copy_targets differ in length")
        if max(sources.max(), targets.max()) >= self._cache.num_blocks:
            raise plan_error("copy_targets", f"a block to copy is not below {self._cache.num_blocks}")
        self._cache.copy_blocks(
            *map(self._device.tensor, (sources.astype(np.int64), targets.astype(np.int64)))
        )

    def _begin_transfers(self, plan: worker_pb2.StepPlan) -> None:
        if not plan.transfers:
            return
        if self.transfers is None:
            raise plan_error("transfers", "this worker has no tiers")
        for transfer in plan.transfers:
            # From now on these blocks are what they were no longer.
            if transfer.block_generations:
                generations = unpack_u32(transfer.block_generations)
                self._batch.generations[unpack_u32(transfer.block_ids)] = generations
        self.transfers.begin(plan.transfers)

    def _restore_state(self, new: worker_pb2.NewSequence) -> None:
        """Gives a sequence that has computed tokens the state after them. Raises PlanError where none is named."""
        if not self._cache.states or not new.num_computed_tokens:
            return
        if not new.HasField("state_block") or new.state_block >= self._cache.num_checkpoints:
            raise plan_error("state_block", f"slot {new.slot} enters without the checkpoint of a state")
        self._cache.restore_states(torch.tensor([new.state_block]), torch.tensor([new.slot]))

    def _add_images(self, new: worker_pb2.NewSequence) -> None:
        if self._images is not None:
            self._images.add(new.slot, new.media, new.num_prompt_tokens, new.num_computed_tokens)
        elif new.media:
            raise no_images()

    def _save_states(self, plan: worker_pb2.StepPlan) -> None:
        """Keeps the states that the plan wants kept, and the generations of where they are."""
        if not plan.save_slots:
            return
        slots, blocks = unpack_u32(plan.save_slots), unpack_u32(plan.save_state_blocks)
        generations = unpack_u32(plan.save_state_generations)
        if not len(slots) == len(blocks) == len(generations):
            raise plan_error("save_slots", "the arrays of saved states differ in length")
        if slots.max() >= self._limits.max_num_seqs or blocks.max() >= self._cache.num_checkpoints:
            raise plan_error("save_slots", "a slot or checkpoint is out of range")
        self._state_generations[blocks] = generations
        self._cache.save_states(
            torch.from_numpy(slots.astype(np.int64)), torch.from_numpy(blocks.astype(np.int64))
        )

    def _logits(self, rows: Rows, states: Any) -> Tensor | None:
        """Logits [samples, vocab_size] float32 of the rows that sample; None where none does."""
        if not rows.samples.any():
            return None
        ends = np.cumsum(rows.lengths)
        if ends[-1] == len(ends) and rows.samples.all():
            return self._model.logits(states, slice(0, len(ends)))
        return self._model.logits(states, self._device.tensor(ends[rows.samples] - 1))

    def _sample(
        self,
        slots: Ints,
        logits: Tensor,
        reports: dict[int, worker_pb2.SlotLogprobs],
        result: worker_pb2.StepResult,
    ) -> None:
        """Samples one token per row of ``logits``, appends them to the batch and reports them."""
        sampled = self._device.sample(logits, slots, self._batch.num_tokens[slots], self._sampling)
        token_ids, bad = sampled.token_ids, sampled.broken | sampled.empty
        if bad.any():
            for row in np.flatnonzero(bad):
                self._fail(int(slots[row]), _sampling_error(bool(sampled.broken[row])), result)
            keep = ~bad
            slots, token_ids, logits = slots[keep], token_ids[keep], logits[keep]
        wanted = np.flatnonzero(self._sampling.logprobs[slots] >= 0)
        if len(wanted):
            at = slots[wanted]
            found = self._device.logprobs(logits[wanted], token_ids[wanted], self._sampling.logprobs[at])
            for slot, logprobs in zip(at.tolist(), found, strict=True):
                report = reports.setdefault(slot, worker_pb2.SlotLogprobs(slot=slot))
                report.sampled.CopyFrom(logprobs)
        self._batch.append_tokens(slots, token_ids)
        self._sampling.record(slots, token_ids)
        result.slots = pack_u32(slots)
        result.token_ids = pack_i32(token_ids)

    def _pool(self, pooling: PoolingConfig, rows: Rows, states: Any, result: worker_pb2.StepResult) -> None:
        """Reports the embeddings of the sequences that this step completes."""
        if self._info.pooling.bidirectional and (rows.starts.any() or not rows.samples.all()):
            raise plan_error(
                "prefill_lengths", "a prompt is cut into chunks, and this encoder needs it whole"
            )
        vectors = pool(pooling, self._model, states, rows.lengths, rows.samples)
        slots = rows.slots[rows.samples]
        fine = np.isfinite(vectors).all(axis=1)
        for slot in slots[~fine].tolist():
            self._fail(slot, _sampling_error(broken=True), result)
        result.slots = pack_u32(slots[fine])
        result.token_ids = pack_i32(np.zeros(np.count_nonzero(fine), np.int32))
        result.embeddings = vectors[fine].astype("<f4").tobytes()

    def _prompt_logprobs(
        self, rows: Rows, states: Any, result: worker_pb2.StepResult
    ) -> dict[int, worker_pb2.SlotLogprobs]:
        """By slot: log-probabilities of the prompt tokens that this step's positions predict. A slot whose logits
        are not finite fails instead."""
        batch, reports = self._batch, {}
        asking = np.flatnonzero(self._sampling.prompt_logprobs[rows.slots] >= 0)
        first_rows = np.cumsum(rows.lengths) - rows.lengths
        for row in asking.tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            end = min(start + int(rows.lengths[row]), int(batch.num_prompt[slot]) - 1)
            if start >= end:
                continue
            report = reports[slot] = worker_pb2.SlotLogprobs(slot=slot, first_prompt_index=start + 1)
            targets = batch.tokens[slot, start + 1 : end + 1].astype(np.int64)
            num_top = np.full(len(targets), self._sampling.prompt_logprobs[slot])
            # A slice at a time: logits of a whole chunk could take a gigabyte.
            for at in range(0, len(targets), 64):
                part = slice(int(first_rows[row]) + at, int(first_rows[row]) + min(at + 64, len(targets)))
                logits = self._model.logits(states, part)
                if not logits.amax(-1).isfinite().all():
                    self._fail(slot, _sampling_error(broken=True), result)
                    del reports[slot]
                    break
                tops = num_top[at : at + 64]
                report.prompt.extend(self._device.logprobs(logits, targets[at : at + 64], tops))
        return reports

    def _fail(self, slot: int, error: KvernError, result: worker_pb2.StepResult) -> None:
        self._batch.failed[slot] = True
        result.errors.append(worker_pb2.SlotError(slot=slot, error=error.to_pb()))


def no_adapters() -> KvernError:
    return KvernError(error_pb2.ERROR_CODE_UNIMPLEMENTED, "this worker serves no adapters")


def _sampling_error(broken: bool) -> KvernError:
    if broken:
        return KvernError(
            error_pb2.ERROR_CODE_NUMERICAL,
            "the model produced NaN or infinite logits for this request; try --dtype float32",
        )
    return KvernError(
        error_pb2.ERROR_CODE_INVALID_ARGUMENT,
        "allowed_token_ids, bad_token_ids, logit_bias and min_tokens together leave no token to sample",
        field="allowed_token_ids",
    )
