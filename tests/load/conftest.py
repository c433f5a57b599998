from __future__ import annotations

from pathlib import Path

import pytest

from pyllm.load import CheckpointError, demo_model_path


@pytest.fixture(scope="session")
def demo_path() -> Path:
    try:
        return demo_model_path()
    except CheckpointError as error:
        pytest.skip(str(error))
