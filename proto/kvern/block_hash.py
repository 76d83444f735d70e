"""Chained hashes of KV blocks: the key of the prefix cache, on the wire and in the store.

``hash_i = SHA256(CBOR([hash_{i-1}, [token ids of block i], extra_keys]))`` in canonical CBOR (RFC 8949 section
4.2.1), where ``hash_{-1}`` is :data:`ROOT_HASH` and ``extra_keys`` is null or a list. The values equal those of
vLLM's ``sha256_cbor`` with its default seed, so that routers and caches that know those know ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import cbor2

HASH_BYTES = 32


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


ROOT_HASH = _sha256_cbor("vllm-none-hash")


def extra_keys(cache_salt: str, block_index: int) -> tuple[Any, ...] | None:
    """What a block's hash depends on besides tokens: the cache salt, in the first block only."""
    return (("cache_salt", cache_salt),) if cache_salt and block_index == 0 else None


class _Encoded(dict[int, bytes]):
    """Token id → its canonical CBOR. Kept, because encoding a block anew costs more than hashing it."""

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = encoded = cbor2.dumps(token_id, canonical=True)
        return encoded


_ENCODED = _Encoded()
# An array of three: a 32-byte string, then the array of tokens; null comes last.
_HEAD, _NULL = b"\x83\x58\x20", b"\xf6"


def hash_block(parent: bytes, token_ids: Sequence[int], extra: tuple[Any, ...] | None = None) -> bytes:
    """Hash of one full block. ``token_ids`` are plain Python integers; ``parent`` is 32 bytes."""
    if extra is not None or len(token_ids) > 255 or len(parent) != HASH_BYTES:
        return _sha256_cbor((parent, tuple(token_ids), extra))
    count = bytes((0x80 + len(token_ids),) if len(token_ids) < 24 else (0x98, len(token_ids)))
    return hashlib.sha256(
        b"".join((_HEAD, parent, count, *map(_ENCODED.__getitem__, token_ids), _NULL))
    ).digest()


def hash_prompt(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[bytes]:
    """Hashes of the full blocks of ``token_ids``, in order; a last partial block has none."""
    hashes: list[bytes] = []
    parent = ROOT_HASH
    for index in range(len(token_ids) // block_size):
        block = token_ids[index * block_size : (index + 1) * block_size]
        parent = hash_block(parent, block, extra_keys(cache_salt, index))
        hashes.append(parent)
    return hashes


def join_hashes(hashes: Iterable[bytes]) -> bytes:
    return b"".join(hashes)


def split_hashes(packed: bytes) -> list[bytes]:
    """Raises ValueError when the length is not a multiple of 32."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"block hashes: {len(packed)} bytes is not a multiple of {HASH_BYTES}")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
