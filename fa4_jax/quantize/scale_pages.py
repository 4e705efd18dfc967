"""The byte order in which `tcgen05` reads block scales: pages of 128 rows by 4 scales.

`tcgen05.cp.32x128b.warpx4` copies one page of 512 bytes into four tensor memory columns. Inside a
page the scale of row m and K-block k (of 4) is byte `(m % 32) * 16 + (m // 32) * 4 + k`; the pages
of one 128-row tile follow each other along K, the row tiles follow those.

Source: PTX ISA, "Scale factor A ID / B ID" layouts of the block-scaled `tcgen05.mma`.
"""

import jax
import jax.numpy as jnp

PAGE_ROWS = 128
PAGE_BLOCKS = 4
PAGE_BYTES = PAGE_ROWS * PAGE_BLOCKS


def to_pages(scales: jax.Array) -> jax.Array:
    """Row-major scales [..., rows, blocks] to pages [..., row tiles, page columns, 512].

    Rows and blocks that fill up the last page are 0: E8M0's 2**-127 or UE4M3's 0, harmless
    because their payload is 0 too.
    """
    rows, blocks = scales.shape[-2:]
    lead = scales.shape[:-2]
    as_bytes = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    padding = [(0, 0)] * len(lead) + [(0, -rows % PAGE_ROWS), (0, -blocks % PAGE_BLOCKS)]
    as_bytes = jnp.pad(as_bytes, padding)
    # [..., row tile, m // 32, m % 32, page column, k] -> [..., tile, column, m % 32, m // 32, k]
    split = as_bytes.reshape(*lead, -1, 4, 32, as_bytes.shape[-1] // PAGE_BLOCKS, PAGE_BLOCKS)
    swizzled = jnp.moveaxis(split, (-2, -3, -4), (-4, -3, -2))
    pages = swizzled.reshape(*swizzled.shape[:-3], PAGE_BYTES)
    return jax.lax.bitcast_convert_type(pages, scales.dtype)


def from_pages(pages: jax.Array, rows: int, blocks: int) -> jax.Array:
    """The inverse of `to_pages`: row-major scales [..., rows, blocks]."""
    lead = pages.shape[:-3]
    as_bytes = jax.lax.bitcast_convert_type(pages, jnp.uint8)
    swizzled = as_bytes.reshape(*pages.shape[:-1], 32, 4, PAGE_BLOCKS)
    split = jnp.moveaxis(swizzled, (-4, -3, -2), (-2, -3, -4))
    padded = split.reshape(*lead, pages.shape[-3] * PAGE_ROWS, pages.shape[-2] * PAGE_BLOCKS)
    return jax.lax.bitcast_convert_type(padded[..., :rows, :blocks], pages.dtype)
