"""Block hashes equal the published values of vLLM's `sha256_cbor` and chain as they should."""

import hashlib
from array import array

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern import block_hash
from kvern.v1.sampling_pb2 import SamplingParams
from kvern_scheduler.core.requests import Request, Submission

FIRST = "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749"
SECOND = "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c"
SALTED = "67e9f72522b34138a0f4be0e3a68d9d49b1e50aea0af7762f6170ad7eebbdeaf"


def test_golden_values():
    root = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    assert root == block_hash.ROOT_HASH.hex()
    assert [h.hex() for h in block_hash.hash_prompt(list(range(32)), 16)] == [FIRST, SECOND]
    assert block_hash.hash_prompt(list(range(16)), 16, cache_salt="s")[0].hex() == SALTED


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.sampled_from([1, 4, 16]))
def test_only_full_blocks_are_hashed_and_prefixes_agree(token_ids, block_size):
    hashes = block_hash.hash_prompt(token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    half = block_hash.hash_prompt(token_ids[: len(token_ids) // 2], block_size)
    assert hashes[: len(half)] == half
    assert block_hash.split_hashes(block_hash.join_hashes(hashes)) == hashes


def test_a_salt_changes_every_block_after_it():
    plain = block_hash.hash_prompt(list(range(48)), 16)
    salted = block_hash.hash_prompt(list(range(48)), 16, cache_salt="tenant")
    assert not set(plain) & set(salted)


def test_a_torn_hash_list_is_refused():
    with pytest.raises(ValueError, match="33 bytes"):
        block_hash.split_hashes(b"x" * 33)


@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1)), min_size=24, max_size=24),
    st.sampled_from([1, 2, 23, 24]),
    st.sampled_from(["", "salt"]),
    st.sampled_from([None, ("my-lora", "/adapters/one")]),
)
def test_hashes_are_of_canonical_cbor(token_ids, block_size, salt, lora):
    parent, expected = block_hash.ROOT_HASH, []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        keys = [("lora", *lora)] if lora else []
        keys += [("cache_salt", salt)] if salt and not expected else []
        extra = tuple(keys) or None
        value = (parent, tuple(token_ids[start : start + block_size]), extra)
        parent = hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
        expected.append(parent)
    assert block_hash.hash_prompt(token_ids, block_size, salt, lora) == expected
    blocks = np.array(token_ids[block_size : len(expected) * block_size], np.int32).reshape(-1, block_size)
    assert (
        block_hash.hash_blocks(expected, blocks, [block_hash.extra_keys(lora)] * len(blocks)) == expected[1:]
    )
    if lora is None:
        assert block_hash.hash_blocks(expected, blocks) == expected[1:]


def test_blocks_of_any_size_are_hashed():
    for size in (255, 256, 70_000):
        value = (block_hash.ROOT_HASH, (7,) * size, None)
        expected = hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
        assert block_hash.hash_prompt([7] * size, size) == [expected]


def test_images_key_the_blocks_that_hold_their_tokens():
    """One over the boundary of two blocks, and another behind it: each by its content and where in the block it begins."""
    tokens = np.arange(64, dtype=np.int32)
    first, second = bytes(range(32)), bytes(32)
    images = [(first, 10, 10), (second, 40, 2)]
    expected, parent = [], block_hash.ROOT_HASH
    for block, keys in enumerate(
        ([("mm", first.hex(), 10)], [("mm", first.hex(), -6)], [("mm", second.hex(), 8)], None)
    ):
        ids = tokens[16 * block : 16 * block + 16].tolist()
        parent = hashlib.sha256(cbor2.dumps([parent, ids, keys], canonical=True)).digest()
        expected.append(parent)
    assert block_hash.hash_prompt(tokens.tolist(), 16, images=images) == expected
    # The scheduler's own, of a prompt that ends within the second block.
    submission = Submission("x", "", b"", tokens[:20], SamplingParams(max_tokens=44), images=images)
    sequence = Request(1, submission, 0.0).sequences[0]
    sequence.output = array("i", tokens[20:].tobytes())
    sequence.extend_hashes(1, 16)
    sequence.extend_hashes(4, 16)
    assert sequence.hashes == expected
    chained = block_hash.hash_blocks([expected[0]], tokens[None, 16:32], [sequence.extra_keys(1, 16)])
    assert chained == expected[1:2]
