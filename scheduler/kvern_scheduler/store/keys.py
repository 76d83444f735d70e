"""Every Redis key of a cell, said once. All share the hash tag ``{cell}``, so a Cluster keeps them in one slot.

kvern:{cell}:leader                 hash    epoch, owner, address, step, digest, expiry_ms, next_rid, retained_ms
kvern:{cell}:live                   set     numbers of the requests that have not ended
kvern:{cell}:request:17             hash    submit: kvern.v1.Submit; f0, f1, …: kvern.v1.Finished by choice
kvern:{cell}:tokens:17.0            string  output tokens of choice 0, int32 little endian, less those in ``recent``
kvern:{cell}:recent                 string  output tokens of the last commits, in order: ``RECENT`` records
kvern:{cell}:logprobs:17.0          string  its log-probabilities, where asked (convert.pack_logprobs)
kvern:{cell}:name:tenant/my-id      string  number of a request that has ended and is still readable
kvern:{cell}:instances              hash    worker instance → highest bucket of its prefix index
kvern:{cell}:adapters               string  kvern.v1.AdapterRegistry: its LoRA adapters
kvern:{cell}:index:<instance>:3     string  ``INDEXED`` records of blocks 3072 to 4095; generation 0: not indexed

``retained_ms`` (Unix time): until then there may be requests that have ended. Their keys expire by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import numpy as np

BLOCKS_PER_BUCKET = 1024
RECENT = np.dtype([("sequence", "<u8"), ("token", "<i4")])
"""``sequence``: request number * 128 + choice."""
INDEXED = np.dtype([("generation", "<u4"), ("hash", "V32")])


@dataclass(frozen=True)
class Keys:
    """``request``, ``tokens``, ``logprobs``, ``names`` and ``index`` are prefixes; the functions in Redis append to
    them."""

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
    def recent(self) -> str:
        return self._key("recent")

    @property
    def instances(self) -> str:
        return self._key("instances")

    @property
    def adapters(self) -> str:
        return self._key("adapters")

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
    def names(self) -> str:
        return self._key("name:")

    @property
    def index(self) -> str:
        return self._key("index:")


def spell(tenant: str, request_id: str) -> str:
    """What follows ``names``: no two pairs are spelled the same."""
    return f"{quote(tenant, safe='')}/{request_id}"
