"""Blocks of the cache: who has which, which are shared, and which are free.

A block holds keys and values of `BLOCK` tokens in all layers. Its users are counted. A full block
is published under a digest of its tokens and of all tokens before them, so that another sequence
that begins with the same tokens shares it. The end of a prompt is published in the same way: the
block goes on after it, so others copy it. A published block without users keeps its contents until
a new one is needed: the one that was released first is taken first.

The ranks of cp share the blocks of a replica: each owns every cp-th of them. The blocks of a
sequence go round the owners, as long as each has a free one, so that all have as much to attend to.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Sequence

from fivefold.core.model import BLOCK as BLOCK
from fivefold.core.model import blocks_of as blocks_of


def chained_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of the tokens of a block and of the block before it (empty for the first)."""
    token_bytes = struct.pack(f"<{len(tokens)}q", *tokens)
    return hashlib.blake2b(before + token_bytes, digest_size=16).digest()


class BlockPool:
    """Allocator of cache blocks. Block b belongs to owner b modulo the number of owners."""

    def __init__(self, count: int, owners: int = 1) -> None:
        self.count, self.owners = count, owners
        self._users = [0] * count
        # Both by owner.
        self._empty = [deque(range(first, count, owners)) for first in range(owners)]
        self._kept = [OrderedDict[int, None]() for _ in range(owners)]  # published, without users
        self._published: dict[bytes, int] = {}
        self._digests: dict[int, list[bytes]] = {}  # of the whole block, and of a prompt's end
        self.num_forgotten = 0  # times that all contents were

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated."""
        return sum(map(self._num_free, range(self.owners)))

    def _num_free(self, owner: int) -> int:
        return len(self._empty[owner]) + len(self._kept[owner])

    def users(self, block: int) -> int:
        """Number of sequences that use a block."""
        return self._users[block]

    def take(self, after: int | None = None) -> int | None:
        """Allocate an empty block; None if there is none. Its owner follows that of block `after`;
        a first block, or one whose owner has no free one, comes from the owner with most free
        blocks."""
        owners = range(self.owners)
        first = max(owners, key=self._num_free) if after is None else after + 1
        order = [(first + offset) % self.owners for offset in owners]
        empty = next((self._empty[owner] for owner in order if self._empty[owner]), None)
        cache = next((self._kept[owner] for owner in order if self._kept[owner]), None)
        if empty is not None:
            block = empty.popleft()
        elif cache is not None:
            block, _ = cache.popitem(last=False)
            for digest in self._digests.pop(block):
                del self._published[digest]
        else:
            return None
        self._users[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """Add a user to the block with these contents; None if there is none."""
        block = self._published.get(digest)
        if block is not None:
            self._kept[block % self.owners].pop(block, None)
            self._users[block] += 1
        return block

    def publish(self, block: int, digest: bytes) -> bool:
        """Make a block shareable; False if another with equal contents is, which stays."""
        assert self._users[block] > 0, "a block without users has no contents"
        if digest in self._published:
            return False
        self._published[digest] = block
        self._digests.setdefault(block, []).append(digest)
        return True

    def release(self, block: int) -> None:
        """Remove a user of a block."""
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
        """Stop sharing all current contents: their weights have changed."""
        self.num_forgotten += 1
        self._published.clear()
        self._digests.clear()
        for empty, cache in zip(self._empty, self._kept, strict=True):
            empty.extend(cache)
            cache.clear()
