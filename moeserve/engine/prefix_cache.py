"""Which KV block holds which prefix: a hash chain over full blocks of token ids.

The key of a block is a keyed hash of the key before it and of its own tokens; the chain starts
from the tenant's salt. The hash only finds a candidate. What makes a hit is comparison: equal
tokens, and the block before it is the very one that was matched just now. So a collision costs a
hit and never returns somebody else's prefix. The secret of the hash is drawn per process, so that
nobody can prepare collisions either.
"""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from moeserve.engine.request import Request

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Entry:
    prefix_id: int
    parent: int | str  # prefix_id of the block before; of a first block, the salt
    token_ids: tuple[int, ...]
    block_id: int


class PrefixCache:
    """Finds blocks by content. It holds no references: the block pool decides what is evicted."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._secret = secrets.token_bytes(32)
        self._entries: dict[bytes, _Entry] = {}
        self._keys: dict[int, bytes] = {}  # block_id -> key of its entry
        self._prefix_ids = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._keys

    def lookup(self, request: Request) -> list[int]:
        """Blocks that hold the front of the request's tokens, as long a run as it may use."""
        block_ids = []
        parent: int | str = request.cache_salt
        for index in range(request.max_cached_tokens // self.block_size):
            entry = self._find(request, index, parent)
            if entry is None:
                break
            block_ids.append(entry.block_id)
            parent = entry.prefix_id
        return block_ids

    def store(self, request: Request) -> None:
        """Makes the request's full, computed blocks findable.

        Where an equal prefix is known already, the request's own copy stays private.
        """
        prefix_ids = request.prefix_ids
        for index in range(len(prefix_ids), request.num_computed_tokens // self.block_size):
            parent = prefix_ids[-1] if prefix_ids else request.cache_salt
            entry = self._find(request, index, parent) or self._insert(request, index, parent)
            prefix_ids.append(entry.prefix_id)

    def forget(self, block_id: int) -> None:
        """Its content is about to be overwritten; a block that is not cached is fine too."""
        key = self._keys.pop(block_id, None)
        if key is not None:
            del self._entries[key]

    def check(self) -> None:
        """Keys and entries belong together one to one.

        Raises:
            RuntimeError: they do not.
        """
        if self._keys != {entry.block_id: key for key, entry in self._entries.items()}:
            raise RuntimeError(
                f"prefix cache: {len(self._keys)} cached blocks, {len(self._entries)} entries, "
                "not paired one to one"
            )

    def hash_block(self, parent_key: bytes, token_ids: list[int]) -> bytes:
        """Key of a block behind the block with ``parent_key``."""
        data = parent_key + array("q", token_ids).tobytes()
        return blake2b(data, digest_size=_KEY_BYTES, key=self._secret).digest()

    def _find(self, request: Request, index: int, parent: int | str) -> _Entry | None:
        entry = self._entries.get(self._key(request, index))
        if entry is None or entry.parent != parent:
            return None
        start = index * self.block_size
        tokens = tuple(request.token_ids[start : start + self.block_size])
        return entry if entry.token_ids == tokens else None

    def _insert(self, request: Request, index: int, parent: int | str) -> _Entry:
        key = self._key(request, index)
        block_id = request.block_ids[index]
        replaced = self._entries.get(key)  # a collision, or a block whose parent is gone
        if replaced is not None:
            del self._keys[replaced.block_id]
        start = index * self.block_size
        tokens = tuple(request.token_ids[start : start + self.block_size])
        entry = _Entry(next(self._prefix_ids), parent, tokens, block_id)
        self._entries[key] = entry
        self._keys[block_id] = key
        return entry

    def _key(self, request: Request, index: int) -> bytes:
        keys = request.block_keys  # tokens never change, so a key is computed once
        while len(keys) <= index:
            start = len(keys) * self.block_size
            parent_key = keys[-1] if keys else request.cache_salt.encode("utf-8", "surrogatepass")
            tokens = request.token_ids[start : start + self.block_size]
            keys.append(self.hash_block(parent_key, tokens))
        return keys[index]
