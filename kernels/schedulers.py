"""Orders in which CTAs take their tiles."""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Boolean, Int32
from cutlass.experimental import primitives as prims


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Static assignment of ``row_tiles x num_heads`` tiles to the CTAs of a grid.

    CTA c takes items c, c + num_ctas, ... of a list with the tiles of one head next to each other,
    so that CTAs at work together share keys and values in the L2 cache. An item is a row tile, or,
    under a causal mask, the pair of row tiles j and row_tiles - 1 - j: their lengths add up to the
    same for every j, which balances the CTAs without a counter in memory. (Longest-first orders
    balance better, but only if they mix many heads, whose keys and values then fall out of L2.)
    Heads start at different items: were num_ctas a multiple of a head's items (132 CTAs, 22 row
    tiles of 192 queries at T = 4096), a CTA would take the same item of all heads, and the one
    whose item crosses a segment's border, say, would finish last by far.

    Attributes:
      paired: whether an item is a pair; two steps an item then. Traced where the kernel learns only
        at run time that its mask is causal.
      row_tiles: row tiles per head (traced, like the rest).
      num_heads: heads times batch elements, numbered batch-major.
      num_ctas: CTAs in the grid.
      cta: this CTA.
    """

    paired: bool | Boolean
    row_tiles: Int32
    num_heads: Int32
    num_ctas: Int32
    cta: Int32

    def choose(self, paired, single):
        """The first if items are pairs, else the second."""
        if isinstance(self.paired, bool):
            return paired if self.paired else single
        return cutlass.select_(self.paired, paired, single)

    def items_per_head(self) -> Int32:
        return self.choose((self.row_tiles + 1) // 2, self.row_tiles)

    def num_steps(self) -> Int32:
        """Steps of this CTA."""
        items = self.items_per_head() * self.num_heads
        rounds = (items - self.cta + (self.num_ctas - 1)) // self.num_ctas
        return self.choose(2 * rounds, rounds)

    def tile(self, step: Int32) -> tuple[Int32, Int32, Boolean]:
        """(row tile, head, whether there is one) of a step; the longer tile of a pair first."""
        step, items_per_head = opaque(step), opaque(self.items_per_head())
        item = self.choose(step // 2, step) * self.num_ctas + self.cta
        head = item // items_per_head
        j = (item + head + head // 4) % items_per_head
        longer = self.row_tiles - 1 - j
        first = self.choose(step % 2 == 0, Boolean(True))
        # The middle one of an odd number is its own partner.
        return Int32(cutlass.select_(first, longer, j)), head, first | (j != longer)


def opaque(x: Int32) -> Int32:
    """``x``, of which the compiler does not know that it is the same each time.

    So it computes what follows from it where that is needed, and keeps it in no registers of loops
    in between.
    """
    return prims.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def longest_first(
    cta: Int32, tiles: Int32, num_heads: Int32, num_sms: Int32
) -> tuple[Int32, Int32]:
    """Head and tile of a CTA, of a grid of one CTA for each of ``tiles x num_heads``.

    For tiles that get shorter with their number, as key tiles under a causal mask do. Heads are
    taken in sections just large enough to fill the GPU, and a section's tiles by number, so that
    the last CTAs to start are short ones, while those that run together share their heads' data
    in the L2 cache.
    """
    section = (num_sms + (tiles - 1)) // tiles
    first_head = cta // (section * tiles) * section
    section = cutlass.min(section, num_heads - first_head)
    item = cta - first_head * tiles
    return first_head + item % section, item // section
