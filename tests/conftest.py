"""What every test gets: random state from one printed seed, and `gpu` tests that skip, visibly, where there is no GPU."""

from __future__ import annotations

import random
import zlib

import numpy
import pytest
import torch
from hypothesis import settings

# Deadlines measure the machine, not the code; a failing example prints how to run it again.
settings.register_profile("pyllm", deadline=None, print_blob=True)
settings.load_profile("pyllm")

NO_GPU = "no CUDA device" if torch.version.cuda else "torch is built without CUDA"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--per-function", type=int, help="run at most this many parameter sets of each test function, evenly spread")
    parser.addoption("--update-golden", action="store_true", default=False, help="rewrite the golden files of explain()")
    parser.addoption(
        "--seed", type=int, default=random.SystemRandom().randrange(2**31), help="seed of the random inputs (printed at the start)"
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: --seed {config.getoption('seed')}; torch {torch.__version__}; {_device()}"


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if most := config.getoption("per_function"):
        _thin(config, items, most)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {NO_GPU}"))


def _thin(config: pytest.Config, items: list[pytest.Item], most: int) -> None:
    """Tools that slow a test a hundredfold see each function at a few of its parameter sets, the first and the last among them."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {id(sets[round(i * (len(sets) - 1) / max(most - 1, 1))]) for sets in functions.values() for i in range(most)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's inputs depend on the seed and its own name, not on which tests ran before."""
    seed = item.config.getoption("seed") ^ zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if isinstance(r.longrepr, tuple) and "needs a GPU" in r.longrepr[2]]
    if skipped:
        files = len({report.nodeid.split("::")[0] for report in skipped})
        terminalreporter.write_line(
            f"{len(skipped)} GPU tests in {files} files were skipped ({NO_GPU}); `make gpu-test` runs them on a GPU machine"
        )
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"the same inputs again: pytest --seed {config.getoption('seed')}")
