"""Names of page contents for prefix reuse: SHA-256 chained over the pages of a sequence, from a salt.

A key decides alone whether two pages hold the same keys and values (their tokens are not compared again), so it must not be possible to
make two prefixes of one key: hence a cryptographic hash. Requests with different salts never share a page, so that a caller cannot tell
from the time to the first token what others have asked. Price: about 1 us for a page of 64 tokens.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


def root_key(salt: str) -> bytes:
    return sha256(b"pyllm page keys\0" + salt.encode()).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: NDArray[np.int32], pages: int, page_size: int) -> None:
    """Append to `keys` until it has one for each of the first `pages` full pages of `tokens`."""
    for i in range(len(keys), pages):
        block = tokens[i * page_size : (i + 1) * page_size].tobytes()
        keys.append(sha256((keys[-1] if keys else root) + block).digest())
