"""Dense attention and its gradients in NumPy, written from the formulas and nothing else.

In float64 it is the reference of every test. With `rounding` every intermediate result is rounded
to a 16-bit dtype: "dense attention in the inputs' own dtype", which the accuracy rule is measured
by. Arguments are those of `fa4_jax.dot_product_attention`, 4-D only.
"""

import dataclasses

import jax
import ml_dtypes
import numpy as np


def visible_keys(
    shape,
    *,
    mask=None,
    is_causal=False,
    local_window_size=None,
    query_offset=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
):
    """bool [B, N, T, S]: whether the query may look at the key."""
    B, _, T, S = shape
    seen = np.ones(shape, bool)
    offsets = np.broadcast_to(0 if query_offset is None else query_offset, (B,))
    left, right = (
        (local_window_size, local_window_size)
        if np.ndim(local_window_size) == 0
        else local_window_size
    )
    for b in range(B):
        position = np.arange(T)[:, None] + int(offsets[b])
        key = np.arange(S)[None, :]
        allowed = np.ones((T, S), bool)
        if is_causal:
            allowed &= key <= position
        if left is not None:
            allowed &= key >= position - left
        if right is not None:
            allowed &= key <= position + right
        if query_seq_lengths is not None:
            allowed[max(0, query_seq_lengths[b]) :] = False
        if key_value_seq_lengths is not None:
            allowed[:, max(0, key_value_seq_lengths[b]) :] = False
        if query_segment_ids is not None:
            allowed &= np.asarray(query_segment_ids[b])[:, None] == key_value_segment_ids[b]
        seen[b] &= allowed
    return seen if mask is None else seen & mask


def segment_bounds(row_ids, column_ids, block=64):
    """int32 [B, blocks, 4]: the kernels' operand of that name (kernels/abi.py), as tight as can be.

    The clear range of a block is the longest run of columns that share the segment of all its rows.
    Empty ranges end before they begin.
    """
    found = []
    for rows, columns in zip(np.asarray(row_ids), np.asarray(column_ids), strict=True):
        for first in range(0, len(rows), block):
            same = rows[first : first + block, None] == columns
            some, all_ = (np.flatnonzero(each) for each in (same.any(0), same.all(0)))
            run = max(np.split(all_, np.flatnonzero(np.diff(all_) > 1) + 1), key=len)
            found += [n for x in (some, run) for n in ([x[0], x[-1] + 1] if len(x) else [7, 3])]
    return np.array(found, np.int32).reshape(len(row_ids), -1, 4)


@dataclasses.dataclass
class Attention:
    """`softmax(cap(scale q k^T) + bias) v` with everything that its gradients need.

    Attributes:
      out: [B, T, N, Hv]; lse: [B, T, N].
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    masks: dict = dataclasses.field(default_factory=dict)
    rounding: np.dtype | None = None

    def __post_init__(self):
        r = self._round
        for name in ("query", "key", "value", "bias", "sinks"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else np.asarray(x, np.float64))
        B, T, N, H = self.query.shape
        S = self.key.shape[1]
        self.scale = H**-0.5 if self.scale is None else float(self.scale)
        group = N // self.key.shape[2]
        # Heads first, each query head with its own copy of its key/value head.
        self._q = np.moveaxis(self.query, 2, 1)
        self._k, self._v = (
            np.moveaxis(np.repeat(x, group, axis=2), 2, 1) for x in (self.key, self.value)
        )
        self._seen = visible_keys((B, N, T, S), **self.masks)
        if self.bias is not None:
            self._seen = self._seen & (self.bias != -np.inf)
        self._dots = r(self._q @ np.swapaxes(self._k, 2, 3))
        logits = r(self.scale * self._dots)
        if self.logits_soft_cap is not None:
            logits = r(self.logits_soft_cap * r(np.tanh(r(logits / self.logits_soft_cap))))
        self._capped = logits
        if self.bias is not None:
            logits = r(logits + np.where(np.isfinite(self.bias), self.bias, 0))
        self._any = self._seen.any(-1)
        peak = np.where(self._seen, logits, -np.inf).max(-1, initial=-np.inf)
        sinks = np.full(N, -np.inf) if self.sinks is None else self.sinks
        peak = np.where(self._any, np.maximum(peak, sinks[None, :, None]), 0)
        weights = r(np.exp(np.where(self._seen, r(logits - peak[..., None]), -np.inf)))
        sink_weights = r(np.exp(np.where(self._any, sinks[None, :, None] - peak, -np.inf)))
        total = np.where(self._any, r(weights.sum(-1) + sink_weights), 1)
        self._probs = r(weights / total[..., None])
        self._sink_probs = r(sink_weights / total)
        self.out = r(np.moveaxis(self._probs @ self._v, 1, 2))
        lse = np.where(self._any, peak + np.log(total), -np.inf)
        self.lse = np.moveaxis(lse, 1, 2)

    def _round(self, x):
        if self.rounding is None:
            return x
        with np.errstate(over="ignore"):
            return x.astype(self.rounding).astype(np.float64)

    def gradients(self, dout, dlse=None):
        """Gradients of `sum(dout * out) + sum(dlse * lse)`, by argument name."""
        r = self._round
        dout = np.moveaxis(np.asarray(dout, np.float64), 1, 2)
        dlse = np.zeros(self.lse.shape) if dlse is None else np.asarray(dlse, np.float64)
        # d lse / d logit_j = p_j;  d out / d logit_j = p_j (v_j - out).
        of_probs = r(dout @ np.swapaxes(self._v, 2, 3))
        through_out = (dout * np.moveaxis(self.out, 2, 1)).sum(-1)
        shared = np.moveaxis(dlse, 1, 2) - through_out
        d_logits = r(self._probs * r(of_probs + shared[..., None]))
        d_sinks = (self._sink_probs * shared).sum((0, 2))
        d_scaled = d_logits
        if self.logits_soft_cap is not None:
            d_scaled = r(d_logits * (1 - (self._capped / self.logits_soft_cap) ** 2))
        d_dots = r(self.scale * d_scaled)
        B, _, K, _ = self.key.shape

        def per_kv_head(x):
            return np.moveaxis(x.reshape(B, K, -1, *x.shape[2:]).sum(2), 1, 2)

        found = {
            "query": np.moveaxis(d_dots @ self._k, 1, 2),
            "key": per_kv_head(np.swapaxes(d_dots, 2, 3) @ self._q),
            "value": per_kv_head(np.swapaxes(self._probs, 2, 3) @ dout),
            "scale": (d_scaled * self._dots).sum(),
            "sinks": d_sinks,
        }
        if self.bias is not None:
            d_bias = d_logits
            axes = [i for i, size in enumerate(self._pad(self.bias.shape)) if size == 1]
            found["bias"] = d_bias.sum(tuple(axes), keepdims=True).reshape(self.bias.shape)
        return {name: r(np.asarray(x)) for name, x in found.items()}

    @staticmethod
    def _pad(shape):
        return (1,) * (4 - len(shape)) + tuple(shape)


def slack_of_scale(operands, d_query):
    """What rounding dq to the query's dtype may do to the gradient of scale, which sums q . dq.

    One number has no largest error of many: that of `rounded` may be small by chance.
    """
    query = operands["query"].astype(np.float64)
    rows = (query**2).sum(-1) * (np.asarray(d_query, np.float64) ** 2).sum(-1)
    unit = ml_dtypes.finfo(operands["query"].dtype).eps / 2
    return float(unit * np.sqrt(rows.sum()) / abs(operands["scale"]))


def slack_of_sinks(operands, out, lse, dout):
    """What rounding out to its dtype may do to the gradients of sinks, which sum p out . dout."""
    seen = np.isfinite(lse)
    weights = np.exp(np.where(seen, operands["sinks"] - np.where(seen, lse, 0), -np.inf))
    rows = (np.asarray(out, np.float64) ** 2).sum(-1) * (dout.astype(np.float64) ** 2).sum(-1)
    unit = ml_dtypes.finfo(operands["query"].dtype).eps / 2
    return float(unit * np.sqrt((weights**2 * rows).sum()))


def assert_accurate(name, actual, exact, rounded, slack=1e-5):
    """The accuracy rule of the exact paths: `max|x - ref| <= 2 max|ref16 - ref| + 1e-5`."""
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    infinite = np.isinf(exact)
    np.testing.assert_array_equal(np.isinf(actual), infinite, err_msg=name)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(exact), err_msg=name)
    difference = np.abs(np.where(infinite, 0, actual) - np.where(infinite, 0, exact))
    allowed = np.abs(np.where(infinite, 0, rounded) - np.where(infinite, 0, exact))
    worst, bound = difference.max(initial=0), 2 * allowed.max(initial=0) + slack
    assert worst <= bound, f"{name}: error {worst:.3g}, allowed {bound:.3g}"


def assert_close(actual, expected, tolerance=2**-7):
    """Trees equal to bfloat16 rounding: sums may be added in another order."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        # Infinities must be equal; they say nothing about the size of a rounding error.
        scale = np.abs(y[np.isfinite(y)]).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)
