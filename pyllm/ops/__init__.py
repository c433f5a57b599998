"""Every op of pyllm, as documented Python functions over `torch.ops.pyllm.*`."""

from __future__ import annotations

from pyllm import _native

_native.load()
