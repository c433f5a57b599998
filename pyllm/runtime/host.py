"""The host classes of the executor: the compiled ones where `pyllm._runtime` was built, else their Python twins. Chosen once, here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllm.twins.pack import StepPacker
    from pyllm.twins.pool import BlockPool

    NATIVE: bool
else:
    try:
        from pyllm._runtime import BlockPool, StepPacker

        NATIVE = True
    except ModuleNotFoundError:
        from pyllm.twins.pack import StepPacker
        from pyllm.twins.pool import BlockPool

        NATIVE = False

__all__ = ["NATIVE", "BlockPool", "StepPacker"]
