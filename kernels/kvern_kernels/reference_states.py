"""What ops on per-sequence states mean, in plain torch: the causal convolution, Mamba-2's scan, the gated delta rule.

T tokens of S sequences, each sequence's together: ``query_start`` int32 [S + 1]. ``rows`` int64 [S] says where in
``states`` [rows, …] float32 each sequence's state lies; −1: it has none and keeps none. ``fresh`` bool [S]: it starts
from zeros. The states are left as the last token makes them. All other tensors are float32, their last axis contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

MAX_CONV_WIDTH = 16


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_start: Tensor,
    rows: Tensor,
    fresh: Tensor,
) -> Tensor:
    """SiLU of each channel's convolution with its own ``weight`` [width, C] over this and the width − 1 tokens before.
    x [T, C], bias [C], states [rows, width − 1, C]: the inputs before the step → [T, C]."""
    out = torch.empty_like(x)
    for tokens, state, keep in _sequences(states, query_start, rows, fresh):
        window = torch.cat((state, x[tokens]))
        for offset, at in enumerate(range(tokens.start, tokens.stop)):
            sum_ = (window[offset : offset + weight.shape[0]] * weight).sum(0)
            out[at] = sum_ if bias is None else sum_ + bias
        keep(window[window.shape[0] - weight.shape[0] + 1 :])
    return out * torch.sigmoid(out)


def mamba_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    states: Tensor,
    query_start: Tensor,
    rows: Tensor,
    fresh: Tensor,
) -> Tensor:
    """Mamba-2's recurrence (arXiv 2405.21060) h ← exp(Δ a) h + Δ x ⊗ b, y = h c + d x with Δ = softplus(dt + dt_bias)
    within ``dt_limit``. x [T, H, P], dt [T, H], b and c [T, G, N] shared by H / G heads each, a (negative), d and dt_bias [H],
    states [rows, H, P, N] → y [T, H, P]."""
    out = torch.empty(x.shape)
    each = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(each, 1), c.repeat_interleave(each, 1)
    step = torch.nn.functional.softplus(dt + dt_bias).clamp(*dt_limit)
    for tokens, h, keep in _sequences(states, query_start, rows, fresh):
        for t in range(tokens.start, tokens.stop):
            h = (
                h * torch.exp(step[t] * a)[:, None, None]
                + (x[t] * step[t, :, None])[:, :, None] * b[t, :, None]
            )
            out[t] = (h * c[t, :, None]).sum(-1) + d[:, None] * x[t]
        keep(h)
    return out


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    query_start: Tensor,
    rows: Tensor,
    fresh: Tensor,
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464): S ← α S, S ← S + k ⊗ β (v − Sᵀ k), o = Sᵀ q with
    α = exp(rate · softplus(a + dt_bias)) and β = σ(b). q and k are brought to length 1, q divided by √K then. q and k
    [T, HK, K], each shared by HV / HK heads of v [T, HV, V]; a and b [T, HV], rate (negative) and dt_bias [HV],
    states [rows, HV, K, V] → o [T, HV, V]."""
    out = torch.empty(v.shape)
    each = v.shape[1] // k.shape[1]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(each, 1) for x in (q / q.shape[-1] ** 0.5, k))
    decay = torch.exp(rate * torch.nn.functional.softplus(a + dt_bias))
    beta = torch.sigmoid(b)
    for tokens, s, keep in _sequences(states, query_start, rows, fresh):
        for t in range(tokens.start, tokens.stop):
            s = s * decay[t, :, None, None]
            delta = (v[t] - (s * k[t, :, :, None]).sum(1)) * beta[t, :, None]
            s = s + k[t, :, :, None] * delta[:, None]
            out[t] = (s * q[t, :, :, None]).sum(1)
        keep(s)
    return out


def _sequences(
    states: Tensor, query_start: Tensor, rows: Tensor, fresh: Tensor
) -> Iterator[tuple[slice, Tensor, Callable[[Tensor], None]]]:
    """Of each sequence its tokens, the state that it goes on from, and what keeps the one after them."""
    bounds = query_start.tolist()
    for start, end, row, new in zip(bounds[:-1], bounds[1:], rows.tolist(), fresh.tolist(), strict=True):

        def keep(state: Tensor, row: int = row) -> None:
            if row >= 0:
                states[row] = state

        yield (
            slice(start, end),
            torch.zeros(states.shape[1:]) if new or row < 0 else states[row].clone(),
            keep,
        )
