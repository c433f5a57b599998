"""tools.profile_case without a GPU: which case is meant, and ncu's table read."""

from __future__ import annotations

import pytest

from tools import profile_case

REPORT = """==PROF== Connected to process 7
n=16384: 12 FLOPs
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Metric Name","Metric Unit","Metric Value"
"0","7","python","here","prefill_kernel<A, B>(int)","1","7","gpu__time_duration.sum","ms","1.41"
"0","7","python","here","prefill_kernel<A, B>(int)","1","7","sm__cycles_elapsed.max","cycle","2,367,970"
"1","7","python","here","flash","1","7","gpu__time_duration.sum","ms","1.38"
"""


def test_one_case_is_found_by_a_part_of_its_name() -> None:
    assert profile_case.find_case("prefill_attention", "D=256 full", "default").name == "n=16384 H=16 K=4 D=256 full bf16"


@pytest.mark.parametrize(("name", "count"), [("D=256", 2), ("D=7", 0)])
def test_none_or_several_are_an_error_that_names_them(name: str, count: int) -> None:
    with pytest.raises(SystemExit, match=rf"case '{name}' of prefill_attention at shapes default is in {count} names, expected 1"):
        profile_case.find_case("prefill_attention", name, "default")


def test_an_unknown_baseline_is_an_error() -> None:
    with pytest.raises(SystemExit, match="against fa4, expected some of fa3, cudnn"):
        profile_case.main(["prefill_attention", "D=256 full", "--against", "fa4"])


def test_a_kernel_is_a_column() -> None:
    lines = profile_case.table(REPORT).splitlines()
    assert lines[:2] == ["kernel 0: prefill_kernel<A, B>(int)", "kernel 1: flash"]
    found = {line[:38].strip(): line[38:].split() for line in lines[3:]}
    assert found["time"] == ["1.41", "ms", "1.38", "ms"]
    assert found["clocks"] == ["2,367,970", "cycle", "-"]


def test_a_report_without_counters_is_an_error() -> None:
    with pytest.raises(SystemExit, match="ncu counted nothing:\n==ERROR== ERR_NVGPUCTRPERM"):
        profile_case.table("==ERROR== ERR_NVGPUCTRPERM")
