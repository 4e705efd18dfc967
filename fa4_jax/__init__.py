"""Exact scaled dot-product attention for JAX on NVIDIA Hopper and Blackwell GPUs."""

import jax
from jax import export

if jax.__version_info__ < (0, 10, 2):
    raise ImportError(f"fa4_jax needs jax 0.10.2 or newer, this is jax {jax.__version__}")

from fa4_jax.api import dot_product_attention
from fa4_jax.custom_calls import TARGETS

EXPORT_SAFETY_CHECKS = tuple(map(export.DisabledSafetyCheck.custom_call, TARGETS))
"""What `jax.export.export(..., disabled_checks=...)` needs for a program with the kernels in it."""

__all__ = ["EXPORT_SAFETY_CHECKS", "dot_product_attention"]
