"""How many rows are computed at once, so that their columns stay in fast memory."""

from collections.abc import Iterator

import numpy as np

# rows of a batch, so that its memory stays below what glibc keeps, see `keep_freed_pages`
CHUNK = 26624
CACHED_ROWS = 4096  # so that the columns of one operation fit into the cache
LARGE_BLOCK_BYTES = 31 << 20  # just below the largest block that raises glibc's threshold


def slices(count: int, size: int = CHUNK) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


def keep_freed_pages() -> None:
    """Lets columns of later batches reuse the pages of earlier ones.

    When a block above a threshold is freed, glibc hands it back to the system, and each page of the
    next one faults again. That takes a third of a batch's seconds. Freeing one large block, which
    nobody touched, raises the threshold to its size.
    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    np.empty(LARGE_BLOCK_BYTES, dtype=np.uint8)
