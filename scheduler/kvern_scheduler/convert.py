"""Between protobuf messages and the core's structures."""

from __future__ import annotations

from kvern.block_hash import split_hashes
from kvern.errors import KvernError, invalid
from kvern.media import keys_of, without_pixels
from kvern.rpc.packing import pack_i32, pack_u32, unpack_i32, unpack_u32
from kvern.v1 import sampling_pb2, session_pb2, worker_pb2
from kvern_scheduler.core.changes import Logprobs
from kvern_scheduler.core.errors import ProtocolError
from kvern_scheduler.core.plan import Entry, Plan, Result
from kvern_scheduler.core.requests import Finish, Submission, sequence_seed
from kvern_scheduler.core.tiers import Transfer

_LENGTH_BYTES = 4


def plan_to_pb(plan: Plan, epoch: int) -> worker_pb2.StepPlan:
    pb = worker_pb2.StepPlan(epoch=epoch, step=plan.step)
    if plan.decoded.size:
        pb.decode_slots = plan.decoded.packed
    if plan.released:
        pb.released_slots = pack_u32(plan.released)
    if plan.append_slots.size:
        pb.append_slots = plan.append_slots.tobytes()
        pb.append_blocks = plan.append_blocks.tobytes()
        pb.append_generations = plan.append_generations.tobytes()
    if plan.prefill_slots:
        pb.prefill_slots = pack_u32(plan.prefill_slots)
        pb.prefill_lengths = pack_u32(plan.prefill_lengths)
    if plan.saves.slots:
        pb.save_slots = pack_u32(plan.saves.slots)
        pb.save_state_blocks = pack_u32(plan.saves.blocks)
        pb.save_state_generations = pack_u32(plan.saves.generations)
    if plan.transfers:
        pb.transfers.extend(map(_transfer_to_pb, plan.transfers))
    if plan.entries:
        pb.new_sequences.extend(map(_entry_to_pb, plan.entries))
    return pb


def _entry_to_pb(entry: Entry) -> worker_pb2.NewSequence:
    request = entry.sequence.request
    params = request.submission.params
    if entry.sequence.choice:
        params = sampling_pb2.SamplingParams.FromString(params.SerializeToString())
        params.seed = sequence_seed(params.seed, entry.sequence.choice)
    return worker_pb2.NewSequence(
        slot=entry.slot,
        sequence_id=f"{request.rid}.{entry.sequence.choice}",
        token_ids=pack_i32(entry.tokens),
        num_prompt_tokens=entry.sequence.num_prompt,
        num_computed_tokens=entry.num_computed,
        block_ids=pack_u32(entry.blocks),
        block_generations=pack_u32(entry.generations),
        params=params,
        state_block=entry.state_block,
        adapter_slot=entry.adapter_slot,
        traceparent=request.submission.traceparent,
        media=[
            # Where keys and values of all its tokens are cached, nobody needs to see it.
            without_pixels(item) if item.offset + item.length <= entry.num_computed else item
            for item in request.submission.media
        ],
    )


def _transfer_to_pb(transfer: Transfer) -> worker_pb2.Transfer:
    return worker_pb2.Transfer(
        id=transfer.id,
        kind=transfer.kind,
        block_ids=transfer.blocks.tobytes(),
        block_generations=transfer.generations.tobytes(),
        hashes=b"".join(transfer.hashes),
    )


def failed_positions(pb: worker_pb2.TransferDone) -> set[int]:
    """Raises ProtocolError where the array is ragged."""
    try:
        return set(unpack_u32(pb.failed).tolist())
    except ValueError as error:
        raise ProtocolError(f"transfer {pb.id}: {error}") from error


def result_from_pb(pb: worker_pb2.StepResult) -> Result:
    """Raises ProtocolError where an array is ragged."""
    try:
        tokens = unpack_i32(pb.token_ids)
    except ValueError as error:
        raise ProtocolError(f"step {pb.step}: {error}") from error
    return Result(pb.step, pb.slots, tokens, list(pb.errors), list(pb.logprobs), pb.embeddings)


def submission_from_pb(pb: session_pb2.Submit) -> Submission:
    """Raises KvernError where packed fields are ragged."""
    if len(pb.prompt_token_ids) % 4:
        raise invalid("prompt_token_ids", "the length in bytes is not a multiple of 4")
    try:
        hashes = split_hashes(pb.block_hashes)
    except ValueError as error:
        raise invalid("block_hashes", str(error)) from error
    return Submission(
        request_id=pb.request_id,
        tenant=pb.tenant,
        body_digest=pb.body_digest,
        prompt=unpack_i32(pb.prompt_token_ids),
        params=pb.params,
        n=pb.n or 1,
        hashes=hashes,
        cache_salt=pb.cache_salt,
        priority=pb.priority,
        deadline=pb.deadline_unix_ms / 1000,
        resumable=pb.resumable,
        model=pb.model,
        gateway_context=pb.gateway_context,
        traceparent=pb.traceparent,
        pooling=pb.pooling,
        media=list(pb.media),
        images=keys_of(pb.media),
        adapter=pb.adapter,
    )


def submission_to_pb(submission: Submission) -> session_pb2.Submit:
    """The record that the store keeps: everything that a later leader needs."""
    return session_pb2.Submit(
        request_id=submission.request_id,
        tenant=submission.tenant,
        body_digest=submission.body_digest,
        prompt_token_ids=pack_i32(submission.prompt),
        params=submission.params,
        n=submission.n,
        block_hashes=b"".join(submission.hashes),
        cache_salt=submission.cache_salt,
        priority=submission.priority,
        deadline_unix_ms=int(submission.deadline * 1000),
        gateway_context=submission.gateway_context,
        resumable=submission.resumable,
        model=submission.model,
        traceparent=submission.traceparent,
        pooling=submission.pooling,
        media=submission.media,
        adapter=submission.adapter,
    )


def finish_to_pb(finish: Finish, handle: int = 0) -> session_pb2.Finished:
    return session_pb2.Finished(
        handle=handle,
        reason=finish.reason,
        stop_token_id=finish.stop_token_id,
        error=finish.error.to_pb() if finish.error is not None else None,
        embedding=finish.embedding,
        num_output_tokens=finish.num_output_tokens,
        num_cached_tokens=finish.num_cached_tokens,
        num_preemptions=finish.num_preemptions,
        queue_seconds=finish.queue_seconds,
        prefill_seconds=finish.prefill_seconds,
    )


def finish_from_pb(pb: session_pb2.Finished) -> Finish:
    error = KvernError.from_pb(pb.error) if pb.HasField("error") else None
    return Finish(
        pb.reason,
        pb.num_output_tokens,
        pb.stop_token_id if pb.HasField("stop_token_id") else None,
        error,
        pb.embedding,
        num_cached_tokens=pb.num_cached_tokens,
        num_preemptions=pb.num_preemptions,
        queue_seconds=pb.queue_seconds,
        prefill_seconds=pb.prefill_seconds,
    )


def logprobs_to_pb(entry: Logprobs, handle: int = 0) -> session_pb2.ChoiceLogprobs:
    return session_pb2.ChoiceLogprobs(
        handle=handle, first_index=entry.first_index, tokens=entry.tokens, prompt=entry.prompt
    )


def pack_logprobs(entry: Logprobs) -> bytes:
    """A kvern.v1.ChoiceLogprobs behind its length (uint32, little endian), so that several can be joined."""
    record = logprobs_to_pb(entry).SerializeToString()
    return b"".join((len(record).to_bytes(_LENGTH_BYTES, "little"), record))


def read_logprobs(log: bytes | bytearray, start: int) -> tuple[session_pb2.ChoiceLogprobs, int]:
    """The record of pack_logprobs that begins at ``start``, and where the next one does."""
    first = start + _LENGTH_BYTES
    end = first + int.from_bytes(log[start:first], "little")
    return session_pb2.ChoiceLogprobs.FromString(bytes(log[first:end])), end


def num_prompt_logprobs(log: bytes | bytearray) -> int:
    """The index of the first prompt token that a log lacks; those of the prompt come first in it."""
    index, start = 1, 0
    while start < len(log):
        record, start = read_logprobs(log, start)
        if not record.prompt:
            break
        index = record.first_index + len(record.tokens)
    return index
