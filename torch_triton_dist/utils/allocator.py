"""Where tensors lie in a symmetric heap: first fit over a sorted list of holes. The same calls in the same order give the same
offsets, which is what makes the tensors of all ranks symmetric."""

from __future__ import annotations

ALIGNMENT = 512  # bytes: what torch's CUDA allocator promises


class OutOfSymmetricMemory(RuntimeError):
    """No hole is large enough."""


class Allocator:
    """Offsets in `start` (inclusive) to `end` (exclusive), in bytes."""

    def __init__(self, start: int, end: int) -> None:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        self._holes = [(start, end)]  # sorted, never touching
        self._taken: dict[int, int] = {}  # offset -> bytes

    def take(self, nbytes: int) -> tuple[int, int]:
        """Offset and size of a new block of at least `nbytes`.

        Raises:
            OutOfSymmetricMemory: no hole is large enough.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for index, (first, last) in enumerate(self._holes):
            if last - first >= size:
                self._holes[index : index + 1] = [(first + size, last)] if last - first > size else []
                self._taken[first] = size
                return first, size
        largest = max((last - first for first, last in self._holes), default=0)
        raise OutOfSymmetricMemory(
            f"the symmetric heap has no room for {size:,} bytes: {sum(self._taken.values()):,} bytes are in use, and the largest "
            f"hole has {largest:,}"
        )

    def give_back(self, offset: int) -> None:
        """Frees a block.

        Raises:
            ValueError: `offset` is not the start of a block.
        """
        size = self._taken.pop(offset, None)
        if size is None:
            raise ValueError("tensor: not one that create_symm_tensor has returned, or freed already")
        holes = sorted([*self._holes, (offset, offset + size)])
        merged = [holes[0]]
        for first, last in holes[1:]:
            if first == merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self._holes = merged
