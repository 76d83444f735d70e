"""Every Redis key of a cell, said once. All share the hash tag ``{cell}``, so a Cluster keeps them in one slot.

kvern:{cell}:leader                 hash    epoch, owner, address, step, digest, expiry_ms, next_rid
kvern:{cell}:live                   set     numbers of the requests that have not ended
kvern:{cell}:finished               zset    numbers of those that have and are still readable; score: expiry, ms
kvern:{cell}:request:17             hash    submit: kvern.v1.Submit; f0, f1, …: kvern.v1.Finished by choice
kvern:{cell}:tokens:17.0            string  output tokens of choice 0, int32 little endian
kvern:{cell}:logprobs:17.0          string  its log-probabilities, where asked (convert.pack_logprobs)
kvern:{cell}:instances              hash    worker instance → highest bucket of its prefix index
kvern:{cell}:index:<instance>:3     hash    block → generation (uint32), hash (32 bytes), for blocks 192 to 255
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS_PER_BUCKET = 64
"""Few enough for a listpack: half the memory of a hash table."""


@dataclass(frozen=True)
class Keys:
    """``request``, ``tokens``, ``logprobs`` and ``index`` are prefixes; the functions in Redis append numbers to them."""

    cell: str

    def _key(self, name: str) -> str:
        return f"kvern:{{{self.cell}}}:{name}"

    @property
    def leader(self) -> str:
        return self._key("leader")

    @property
    def live(self) -> str:
        return self._key("live")

    @property
    def finished(self) -> str:
        return self._key("finished")

    @property
    def instances(self) -> str:
        return self._key("instances")

    @property
    def request(self) -> str:
        return self._key("request:")

    @property
    def tokens(self) -> str:
        return self._key("tokens:")

    @property
    def logprobs(self) -> str:
        return self._key("logprobs:")

    @property
    def index(self) -> str:
        return self._key("index:")
