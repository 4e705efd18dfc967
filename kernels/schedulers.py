"""Orders in which persistent CTAs take their tiles."""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Int32

# Keys and values that one section of heads may occupy in the L2 cache (50 MB on H100 and H200,
# half of it near each SM), leaving room for what streams through.
SECTION_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Static order of the ``row_tiles x num_heads`` tiles of a grid of ``num_ctas`` CTAs.

    Heads (of all batch elements, numbered batch-major) are split into sections small enough that
    the keys and values of one stay in L2. Within a section row tiles descend, so that under a
    causal mask the longest come first, and heads vary fastest. In round r CTA c takes position
    ``r * num_ctas + c``, or, in odd rounds, ``r * num_ctas + (num_ctas - 1 - c)``: going back
    and forth evens out the decline of tile lengths within a round.

    Attributes (traced Int32):
      row_tiles: row tiles per head.
      num_heads: heads times batch elements.
      section: heads per section.
      num_ctas: CTAs in the grid.
      cta: this CTA.
    """

    row_tiles: Int32
    num_heads: Int32
    section: Int32
    num_ctas: Int32
    cta: Int32

    def num_rounds(self) -> Int32:
        return (self.row_tiles * self.num_heads + self.num_ctas - 1) // self.num_ctas

    def position(self, round_: Int32) -> Int32:
        """Position in the order; may be past the end in the last round."""
        turned = self.num_ctas - 1 - self.cta
        cta = cutlass.select_(round_ % 2 == 0, self.cta, turned)
        return round_ * self.num_ctas + cta

    def tile(self, position: Int32) -> tuple[Int32, Int32]:
        """(row tile, head) at a position."""
        first_head = position // (self.section * self.row_tiles) * self.section
        width = cutlass.min(self.section, self.num_heads - first_head)
        within = position - first_head * self.row_tiles
        row_tile = self.row_tiles - 1 - within // width
        return row_tile, first_head + within % width


def section_heads(head_bytes: Int32, group: Int32) -> Int32:
    """Query heads per section, a multiple of the group that shares one key/value head.

    Args:
      head_bytes: bytes of keys and values of one key/value head.
      group: query heads per key/value head.
    """
    return cutlass.max(Int32(SECTION_BYTES) // cutlass.max(head_bytes, Int32(1)), Int32(1)) * group
