"""Chained hashes of KV blocks: the key of the prefix cache, on the wire and in the store.

``hash_i = SHA256(CBOR([hash_{i-1}, [token ids of block i], extra_keys]))`` in canonical CBOR (RFC 8949 section
4.2.1), where ``hash_{-1}`` is :data:`ROOT_HASH` and ``extra_keys`` is null or a list. The values equal those of
vLLM's ``sha256_cbor`` with its default seed, so that routers and caches that know those know ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import cbor2
import numpy as np
import numpy.typing as npt

from kvern.v1 import adapter_pb2

HASH_BYTES = 32
ROOT_HASH = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()


Lora = tuple[str, str]
"""Two strings that say which adapter, as every block's hash has them."""
Image = tuple[bytes, int, int]
"""Content hash of an image, position of its first token and number of its tokens: see kvern.v1.MediaItem."""
NO_EXTRA = cbor2.dumps(None, canonical=True)


def adapter_keys(adapter: adapter_pb2.Adapter) -> Lora:
    """Its name and its files' digest: what is loaded later under the same name and path is another adapter."""
    return adapter.name, adapter.digest.hex()


def extra_keys(
    lora: Lora | None = None,
    cache_salt: str = "",
    images: Sequence[Image] = (),
    start: int = 0,
    size: int = 0,
) -> bytes:
    """What a block's hash depends on besides tokens, encoded. Only a first block has ``cache_salt``; later ones depend
    on it by their parent. ``images``: of the sequence; those count that have tokens among the ``size`` from ``start`` on,
    which are the block's, and where in it they begin."""
    keys: list[tuple[str | int, ...]] = [("lora", *lora)] if lora else []
    keys += [
        ("mm", digest.hex(), offset - start)
        for digest, offset, length in images
        if offset < start + size and start < offset + length
    ]
    if cache_salt:
        keys.append(("cache_salt", cache_salt))
    return cbor2.dumps(tuple(keys), canonical=True) if keys else NO_EXTRA


# Canonical CBOR of an unsigned integer: from which value on it takes another form, that form's head (already left of the
# number's own bytes), the bytes of a big-endian 8-byte word that it keeps, and how many these are.
_FORMS = np.array([24, 2**8, 2**16], np.int32)
_HEADS = np.array([0, 0x18 << 8, 0x19 << 16, 0x1A << 32], np.uint64)
_WIDTHS = np.array([1, 2, 3, 5])
_KEPT = np.arange(8) >= 8 - _WIDTHS[:, None]


def _encode_blocks(blocks: npt.NDArray[np.int32]) -> list[bytes]:
    """The CBOR array of each row's token ids; ``blocks``: [num_blocks, block_size], not negative."""
    form = _FORMS.searchsorted(blocks.ravel(), side="right")
    words = (_HEADS[form] + blocks.ravel().astype(np.uint64)).astype(">u8")
    packed = words.view(np.uint8).reshape(-1, 8)[_KEPT[form]].tobytes()
    ends = _WIDTHS[form].reshape(blocks.shape).sum(axis=1).cumsum().tolist()
    # A zero takes one byte.
    head = cbor2.dumps((0,) * blocks.shape[1], canonical=True)[: -blocks.shape[1]]
    return [head + packed[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _hash(parent: bytes, encoded_tokens: bytes, encoded_extra: bytes = NO_EXTRA) -> bytes:
    """SHA-256 of an array of three: a 32-byte string, an array of tokens, and the extra keys or null."""
    return hashlib.sha256(b"\x83\x58\x20%b%b%b" % (parent, encoded_tokens, encoded_extra)).digest()


def hash_blocks(
    parents: Iterable[bytes], blocks: npt.NDArray[np.int32], extras: Iterable[bytes] | None = None
) -> list[bytes]:
    """Hashes of blocks of different sequences, none of them a sequence's first: ``blocks`` int32 [num_blocks,
    block_size], ``parents`` the hash of the block before each, ``extras`` what ``extra_keys`` says of each."""
    if extras is None:
        return list(map(_hash, parents, _encode_blocks(blocks)))
    return list(map(_hash, parents, _encode_blocks(blocks), extras))


def extend_hashes(
    hashes: list[bytes],
    token_ids: npt.NDArray[np.int32],
    block_size: int,
    cache_salt: str = "",
    lora: Lora | None = None,
    images: Sequence[Image] = (),
) -> None:
    """Appends the hashes of the full blocks of ``token_ids``, which follow the blocks that ``hashes`` covers. A last
    partial block has none."""
    num_blocks = token_ids.size // block_size
    blocks = token_ids[: num_blocks * block_size].reshape(num_blocks, block_size)
    later = extra_keys(lora)
    for encoded in _encode_blocks(blocks):
        start = len(hashes) * block_size
        if not hashes:
            extra = extra_keys(lora, cache_salt, images, start, block_size)
            hashes.append(_hash(ROOT_HASH, encoded, extra))
            continue
        extra = extra_keys(lora, "", images, start, block_size) if images else later
        hashes.append(_hash(hashes[-1], encoded, extra))


def hash_prompt(
    token_ids: Sequence[int],
    block_size: int,
    cache_salt: str = "",
    lora: Lora | None = None,
    images: Sequence[Image] = (),
) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids``, in order; a last partial block has none."""
    hashes: list[bytes] = []
    extend_hashes(hashes, np.array(token_ids, np.int32), block_size, cache_salt, lora, images)
    return hashes


def join_hashes(hashes: Iterable[bytes]) -> bytes:
    return b"".join(hashes)


def split_hashes(packed: bytes) -> list[bytes]:
    """Raises ValueError when the length is not a multiple of 32."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"block hashes: {len(packed)} bytes is not a multiple of {HASH_BYTES}")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
