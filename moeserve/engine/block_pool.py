"""KV blocks of one rank: who holds which, and which is given away next.

A block is free or held; a held one counts its holders, since requests share the blocks of a common
prefix. A free block may still be cached: it keeps its content, and its place in the free order
says how soon that is overwritten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from moeserve.engine.prefix_cache import PrefixCache


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens; ids are 0 .. num_blocks - 1.

    prefix_cache: None turns the reuse of equal prefixes off.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache(block_size) if enable_prefix_caching else None
        self._ref_counts = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # front: given away next

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated; cached ones without a holder are among them."""
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks, each with one holder; cached content goes, oldest use first.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} free")
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            if self.prefix_cache is not None:
                self.prefix_cache.forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these are free, so that touching them makes the free ones fewer."""
        return sum(1 for block_id in block_ids if not self._ref_counts[block_id])

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each block, cached and free or held."""
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one holder from each block of a table; who has none left becomes free.

        Content worth keeping joins the back of the free order, the end of a sequence before its
        front: a prefix is of no use without what stands before it.

        Raises:
            ValueError: a block has no holder.
        """
        for block_id in reversed(block_ids):
            if not self._ref_counts[block_id]:
                raise ValueError(f"block {block_id} released without a holder")
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self._free[block_id] = None
                if self.prefix_cache is None or block_id not in self.prefix_cache:
                    self._free.move_to_end(block_id, last=False)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Free and held blocks are all blocks; holders are the entries of all block tables.

        Args:
            tables: the block ids of every request that holds some.

        Raises:
            RuntimeError: it is not so; the text has the numbers.
        """
        holders = Counter(block_id for table in tables for block_id in table)
        for block_id, ref_count in enumerate(self._ref_counts):
            if ref_count != holders[block_id] or (ref_count == 0) != (block_id in self._free):
                raise RuntimeError(
                    f"block {block_id}: {ref_count} holders counted, {holders[block_id]} in block "
                    f"tables, {'in' if block_id in self._free else 'not in'} the free order"
                )
        if self.prefix_cache is not None:
            self.prefix_cache.check()
