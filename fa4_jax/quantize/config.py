"""Configurations of quantised attention: which formats, which classifier, which row reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fa4_jax.quantize.containers import Format


@dataclasses.dataclass(frozen=True)
class Classifier:
    """How a normalised log-score x becomes an E2M1 probability code, without an exponential.

    The code is E2M1(max(0, A1*x + B1, A2*x + B2, ...)), and E2M1(2**x) where `native` is set for
    that score: for none, for one pair of scores in four, or for all.

    Attributes:
      lines: (A, B) of each affine piece; one packed fused multiply-add per pair of scores and
        piece, and a packed max from the second piece on.
      native_pairs: of every four neighbouring pairs, the first so many use native 2**x.
    """

    lines: tuple[tuple[float, float], ...]
    native_pairs: int = 0

    def __post_init__(self):
        if not 0 <= self.native_pairs <= 4:
            raise ValueError(f"native_pairs must be 0 to 4, got {self.native_pairs}")
        if not self.lines and self.native_pairs < 4:
            raise ValueError("a classifier needs lines unless all four pairs are native")


# The first three are the paper's constants (section 4).
AFFINE_FAST = Classifier(lines=((1.50, 1.20),))
AFFINE_WAN = Classifier(lines=((1.60, 0.95),))
ACCURATE = Classifier(lines=((1.65, 0.80),), native_pairs=1)
EXACT = Classifier(lines=(), native_pairs=4)
# Least squared error of the normalised probabilities over Gaussian logits of standard deviation
# 0.5, 1, 2 and 3 nats, among the hinges that shift no log-sum-exp by more than 0.16 nat.
HINGE = Classifier(lines=((0.435, 1.075), (2.275, -0.511)))


@dataclasses.dataclass(frozen=True)
class RunningMax:
    """Row reference m: the ceiling of the running base-2 row maximum, an integer.

    An integer reference scales every probability by a power of two, so E2M1 codes do not depend on
    it. The accumulators are rescaled only when a tile's maximum passes m by more than `slack`
    binary orders; FP8 and NVFP4 probabilities have no range to spare and use slack 0.
    """

    slack: int = 8


@dataclasses.dataclass(frozen=True)
class NoReference:
    """Row reference m = 0, the paper's fastest variant.

    Silently wrong for rows with a logit above about 88 nats (2**127) or only logits far below 0.
    """


@dataclasses.dataclass(frozen=True)
class SampledGuard:
    """Row reference m = (maximum over 128 evenly spaced keys) + margin, fixed for the whole row.

    For logits beyond 500 without a running maximum: the sampled keys are moved into the first key
    tile (attention without a mask does not depend on the order of keys), and rows whose maximum
    lies up to about `margin` binary orders above the sampled one stay finite. The price: blocks
    more than `126 - margin - shift` orders below the sampled maximum lose accuracy, then vanish.

    Attributes:
      margin: M, binary orders of headroom above the sampled maximum.
      shift: L, binary orders by which the stored scales are lowered, which keeps the output
        accumulator finite.
    """

    margin: int = 110
    shift: int = 16

    def __post_init__(self):
        if self.margin < 0 or self.shift < 0:
            raise ValueError(
                f"SampledGuard needs margin >= 0 and shift >= 0, got {self.margin}, {self.shift}"
            )
        if self.margin + self.shift > 126:
            raise ValueError(
                f"SampledGuard needs margin + shift <= 126 (the exponents of E8M0 below 1), got "
                f"{self.margin} + {self.shift}"
            )


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """One quantised attention route; hashable, so that it can be part of an AttentionSpec.

    Attributes:
      query_key: format of query and key, blocked along the head dimension.
      probability_value: format of the probabilities and of value, blocked along the keys.
      classifier: for MXFP4 probabilities, how scores become codes; None for the other formats,
        which round the exponential.
      row_reference: what is subtracted from a row's scores.
      observe_gradients: called in every backward pass, from the host, with a dict of float32
        scalars: `dout_zero` and `ds_zero`, the fractions of non-zero elements of dO and dS that FP8
        rounds to 0, and `ds_saturated`, that of dS beyond its largest value. Inside `jax.vmap` once
        for each element. For routes that have gradients.
      least_squares: choose the block scales of query, key and value by squared error, not from
        the largest element alone. Costs the kernel nothing: they are chosen before it runs.
    """

    query_key: Format
    probability_value: Format
    classifier: Classifier | None = None
    row_reference: RunningMax | NoReference | SampledGuard = RunningMax()
    least_squares: bool = False
    observe_gradients: Callable[[dict], None] | None = None

    def __post_init__(self):
        allowed = (Format.NVFP4, Format.NVFP4_FOLDED, Format.FP8_E4M3)
        if self.query_key not in allowed:
            raise ValueError(f"query_key must be one of {_names(allowed)}, got {self.query_key}")
        allowed = (Format.MXFP4_SIX, Format.NVFP4, Format.FP8_E4M3)
        if self.probability_value not in allowed:
            raise ValueError(
                f"probability_value must be one of {_names(allowed)}, got {self.probability_value}"
            )
        mx = self.probability_value is Format.MXFP4_SIX
        if mx != (self.classifier is not None):
            raise ValueError(
                "a classifier goes with probability_value=MXFP4_SIX and with nothing else, got "
                f"classifier={self.classifier} with {self.probability_value}"
            )
        if self.least_squares and Format.FP8_E4M3 in (self.query_key, self.probability_value):
            raise ValueError("least_squares chooses block scales, and FP8 has none")
        if not mx and self.row_reference != RunningMax(slack=0):
            raise ValueError(
                f"{self.probability_value.value} probabilities need row_reference="
                f"RunningMax(slack=0), got {self.row_reference}"
            )


FP4 = QuantizationConfig(Format.NVFP4, Format.MXFP4_SIX, classifier=HINGE, least_squares=True)
FP4_AFFINE = QuantizationConfig(Format.NVFP4_FOLDED, Format.MXFP4_SIX, classifier=AFFINE_FAST)
FP4_ACCURATE = QuantizationConfig(Format.NVFP4_FOLDED, Format.MXFP4_SIX, classifier=ACCURATE)
NVFP4_FP8 = QuantizationConfig(Format.NVFP4, Format.FP8_E4M3, row_reference=RunningMax(slack=0))
NVFP4_ALL = QuantizationConfig(Format.NVFP4, Format.NVFP4, row_reference=RunningMax(slack=0))
FP8 = QuantizationConfig(Format.FP8_E4M3, Format.FP8_E4M3, row_reference=RunningMax(slack=0))

SHORT_NAMES = {
    "fp4": FP4,
    "fp4_affine": FP4_AFFINE,
    "fp4_accurate": FP4_ACCURATE,
    "nvfp4_fp8": NVFP4_FP8,
    "fp8": FP8,
}


def resolve(quantization: QuantizationConfig | str | None) -> QuantizationConfig | None:
    """The configuration meant by `quantization=`: a config, one of the short names, or None.

    Raises:
      ValueError: anything else.
    """
    if quantization is None or isinstance(quantization, QuantizationConfig):
        return quantization
    if isinstance(quantization, str) and quantization in SHORT_NAMES:
        return SHORT_NAMES[quantization]
    raise ValueError(
        f"quantization={quantization!r}: give None, a QuantizationConfig or one of "
        f"{', '.join(map(repr, SHORT_NAMES))}"
    )


def _names(formats):
    return ", ".join(f.name for f in formats)
