"""How long a step takes, as a sum of terms fitted to steps of a real worker, so that a simulated one can take as long.

    us = fixed + token · (prompt tokens) + pair · (prompt token, key) + sequence · (decoding) + key · (keys they read)

``fixed`` is what reading the weights costs, ``token`` a prompt token's share of the products, ``pair`` and ``key`` attention.
All are at least 0. In a file: a JSON object of these names with ``_us`` behind them, and what they were fitted to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvern.errors import KvernError, invalid

TERMS = ("fixed_us", "token_us", "pair_us", "sequence_us", "key_us")


@dataclass(frozen=True)
class Work:
    """What one step computes."""

    tokens: int = 0
    """Of prompts."""
    pairs: int = 0
    """Each of those with each key before it and itself."""
    sequences: int = 0
    """That decode."""
    keys: int = 0
    """That those read."""

    @classmethod
    def of(
        cls, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64]
    ) -> Work:
        """Chunks from position ``starts`` to before ``ends``, and the lengths of what decodes."""
        pairs = (ends * (ends + 1) - starts * (starts + 1)) // 2
        return cls(int((ends - starts).sum()), int(pairs.sum()), contexts.size, int(contexts.sum()))


@dataclass(frozen=True)
class StepProfile:
    """Microseconds of each term."""

    fixed_us: float
    token_us: float = 0.0
    pair_us: float = 0.0
    sequence_us: float = 0.0
    key_us: float = 0.0

    def us(self, work: Work) -> float:
        return (
            self.fixed_us
            + self.token_us * work.tokens
            + self.pair_us * work.pairs
            + self.sequence_us * work.sequences
            + self.key_us * work.keys
        )

    def write(self, path: Path, about: dict[str, object]) -> None:
        path.write_text(json.dumps({**asdict(self), "about": about}, indent=2) + "\n")


def read_profile(path: str) -> StepProfile:
    """Raises KvernError where the file is not one that :meth:`StepProfile.write` wrote."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise _wrong(path, f"cannot read it: {error.strerror}") from None
    except ValueError as error:
        raise _wrong(path, f"it is not JSON: {error}") from None
    if not isinstance(content, dict) or "fixed_us" not in content:
        raise _wrong(path, "it has no fixed_us; `kvern bench fit-profile` writes such files")
    values = {name: content.get(name, 0.0) for name in TERMS}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise _wrong(path, f"{name} must be a number of at least 0, is {value!r}")
    return StepProfile(**values)


def _wrong(path: str, why: str) -> KvernError:
    return invalid("sim_profile", f"sim-profile {path}: {why}", value=path)


def fit(works: Sequence[Work], us: Sequence[float]) -> StepProfile:
    """The terms with the least relative errors, none below 0. Raises ValueError where there are fewer steps than terms."""
    if len(works) < len(TERMS):
        raise ValueError(f"{len(works)} steps are too few to fit {len(TERMS)} terms to")
    measured = np.array(us)
    rows = np.array([[1, w.tokens, w.pairs, w.sequences, w.keys] for w in works], np.float64)
    weighted = rows / measured[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    weighted /= scale
    kept = list(range(len(TERMS)))
    # A term that would be negative is left out; the fixed one stays.
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(works)), rcond=None)
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            break
        kept.pop(worst)
    values = np.zeros(len(TERMS))
    values[kept] = found / scale[kept]
    return StepProfile(*(float(value) for value in values))


def relative_errors(
    profile: StepProfile, works: Sequence[Work], us: Sequence[float]
) -> npt.NDArray[np.float64]:
    """|predicted − measured| / measured of each step."""
    predicted = np.array([profile.us(work) for work in works])
    measured = np.array(us)
    return np.asarray(abs(predicted - measured) / measured)
