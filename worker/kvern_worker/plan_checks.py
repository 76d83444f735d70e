"""What is wrong with a plan, whatever executor runs it; and the results that need none."""

from __future__ import annotations

from kvern.errors import KvernError, invalid
from kvern.rpc.packing import unpack_u32
from kvern.v1 import error_pb2, worker_pb2

HASH_BYTES = 32


def check_plan(
    plan: worker_pb2.StepPlan, max_num_seqs: int, num_blocks: int, num_state_blocks: int = 0
) -> None:
    """Raises INVALID_ARGUMENT where an array is ragged, or names a slot or block that does not exist."""
    for slots_field, others in (
        ("append_slots", ("append_blocks", "append_generations")),
        ("copy_sources", ("copy_targets",)),
        ("prefill_slots", ("prefill_lengths",)),
        ("save_slots", ("save_state_blocks", "save_state_generations")),
    ):
        size = len(getattr(plan, slots_field))
        for other in others:
            if len(getattr(plan, other)) != size:
                raise invalid(other, f"step {plan.step}: {other} and {slots_field} differ in length")
    for field, limit in (
        ("released_slots", max_num_seqs),
        ("append_slots", max_num_seqs),
        ("append_blocks", num_blocks),
        ("copy_sources", num_blocks),
        ("copy_targets", num_blocks),
        ("prefill_slots", max_num_seqs),
        ("decode_slots", max_num_seqs),
        ("save_slots", max_num_seqs),
        ("save_state_blocks", num_state_blocks),
    ):
        packed = getattr(plan, field)
        if packed:
            _check_below(plan, field, packed, limit)
    for transfer in plan.transfers:
        _check_transfer(plan, transfer, num_blocks)
    for new in plan.new_sequences:
        if new.slot >= max_num_seqs:
            raise invalid("slot", f"step {plan.step}: slot {new.slot} is not below {max_num_seqs}")
        if len(new.block_ids) != len(new.block_generations):
            raise invalid("block_ids", f"step {plan.step}: block_ids and block_generations differ in length")
        if len(new.token_ids) % 4 or not new.token_ids:
            raise invalid("token_ids", f"step {plan.step}: token_ids are empty or ragged")
        if new.block_ids:
            _check_below(plan, "block_ids", new.block_ids, num_blocks)
        if new.HasField("state_block") and new.state_block >= num_state_blocks:
            raise invalid(
                "state_block",
                f"step {plan.step}: checkpoint {new.state_block} is not below {num_state_blocks}",
            )


def _check_transfer(plan: worker_pb2.StepPlan, transfer: worker_pb2.Transfer, num_blocks: int) -> None:
    count, ragged = divmod(len(transfer.hashes), HASH_BYTES)
    on_device = transfer.kind in (worker_pb2.TRANSFER_KIND_STORE, worker_pb2.TRANSFER_KIND_LOAD)
    loads = transfer.kind == worker_pb2.TRANSFER_KIND_LOAD
    blocks, generations = len(transfer.block_ids) // 4, len(transfer.block_generations) // 4
    if ragged or blocks != count * on_device or generations != count * loads or not count:
        raise invalid(
            "transfers", f"step {plan.step}: blocks and hashes of transfer {transfer.id} do not match"
        )
    if transfer.kind not in worker_pb2.TransferKind.values() or not transfer.kind:
        raise invalid("transfers", f"step {plan.step}: there is no kind of transfer {transfer.kind}")
    if transfer.block_ids:
        _check_below(plan, "block_ids", transfer.block_ids, num_blocks)


def _check_below(plan: worker_pb2.StepPlan, field: str, packed: bytes, limit: int) -> None:
    if len(packed) % 4:
        raise invalid(field, f"step {plan.step}: {field} has {len(packed)} bytes, not a multiple of 4")
    largest = int(unpack_u32(packed).max())
    if largest >= limit:
        raise invalid(field, f"step {plan.step}: {field} names {largest}", value=largest, limit=limit - 1)


def is_empty(plan: worker_pb2.StepPlan) -> bool:
    """A plan without content: a leader's first word, by which it claims the batch before it takes the inventory."""
    return not (
        plan.decode_slots
        or plan.prefill_slots
        or plan.new_sequences
        or plan.released_slots
        or plan.append_slots
        or plan.copy_sources
        or plan.transfers
    )


def claimed(plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(epoch=plan.epoch, step=plan.step)


def failed_step(plan: worker_pb2.StepPlan, error: BaseException) -> worker_pb2.StepResult:
    """The result of a step whose computation raised: every sequence in it failed, with INTERNAL."""
    pb = KvernError(
        error_pb2.ERROR_CODE_INTERNAL, f"the worker failed in this request's step: {type(error).__name__}"
    ).to_pb()
    slots = [*unpack_u32(plan.prefill_slots).tolist(), *unpack_u32(plan.decode_slots).tolist()]
    return worker_pb2.StepResult(
        epoch=plan.epoch,
        step=plan.step,
        errors=[worker_pb2.SlotError(slot=slot, error=pb) for slot in slots],
    )
