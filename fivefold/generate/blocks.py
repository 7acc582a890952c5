"""Blocks of the cache: who has which, which are shared, and which are free.

A block holds keys and values of `BLOCK` tokens in all layers. Its users are counted. A full block
is published under a digest of its tokens and of all tokens before them, so that another sequence
that begins with the same tokens shares it. A block without users keeps its contents until a new one
is needed: the one that was released first is taken first.

The ranks of cp share the blocks of a replica: each owns every cp-th of them. The blocks of a
sequence go round the owners, as long as each has a free one, so that all have as much to attend to.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

from fivefold.core.model import BLOCK as BLOCK
from fivefold.core.model import blocks_of as blocks_of


def chained_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Of a full block, given that of the block before it (empty for the first one)."""
    token_bytes = b"".join(token.to_bytes(8, "little") for token in tokens)
    return hashlib.blake2b(before + token_bytes, digest_size=16).digest()


class BlockPool:
    """All blocks of a cache. Block b is that of owner b modulo the number of owners."""

    def __init__(self, count: int, owners: int = 1) -> None:
        self.count, self.owners = count, owners
        self._users = [0] * count
        # Both by owner.
        self._empty = [deque(range(first, count, owners)) for first in range(owners)]
        self._kept = [OrderedDict[int, None]() for _ in range(owners)]  # published, without users
        self._published: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that a sequence can get."""
        return sum(map(self._num_free, range(self.owners)))

    def _num_free(self, owner: int) -> int:
        return len(self._empty[owner]) + len(self._kept[owner])

    def users(self, block: int) -> int:
        """The sequences that have this block."""
        return self._users[block]

    def take(self, after: int | None = None) -> int | None:
        """A block for one user, without contents; None if all have users. Its owner is the one next
        to that of block `after`, or for a first block the one with the most free ones; another, if
        that one has none."""
        owners = range(self.owners)
        first = max(owners, key=self._num_free) if after is None else after + 1
        order = [(first + offset) % self.owners for offset in owners]
        empty = next((self._empty[owner] for owner in order if self._empty[owner]), None)
        cache = next((self._kept[owner] for owner in order if self._kept[owner]), None)
        if empty is not None:
            block = empty.popleft()
        elif cache is not None:
            block, _ = cache.popitem(last=False)
            del self._published[self._digests.pop(block)]
        else:
            return None
        self._users[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """The block with these contents, for one more user; None if there is none."""
        block = self._published.get(digest)
        if block is not None:
            self._kept[block % self.owners].pop(block, None)
            self._users[block] += 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """The block is full: others may share it. Of two with equal contents the first is kept."""
        assert self._users[block] > 0, "a block without users has no contents"
        if digest not in self._published and block not in self._digests:
            self._published[digest] = block
            self._digests[block] = digest

    def release(self, block: int) -> None:
        """One user less."""
        assert self._users[block] > 0, "released more often than taken"
        self._users[block] -= 1
        if self._users[block]:
            return
        owner = block % self.owners
        if block in self._digests:
            self._kept[owner][block] = None
        else:
            self._empty[owner].append(block)

    def forget(self) -> None:
        """Share no more of what is there: the weights that it was computed with have changed."""
        self._published.clear()
        self._digests.clear()
        for empty, cache in zip(self._empty, self._kept, strict=True):
            empty.extend(cache)
            cache.clear()
