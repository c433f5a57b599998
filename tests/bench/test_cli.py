"""The command line without a GPU, the declaration of cases, and the arithmetic of the timer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import case as bench_case
from bench import peers, records, results_page
from bench.__main__ import main, parser
from bench.case import Case, Goal, Op, PeerMissing, all_ops, select
from bench.shapes import PUBLISHED, SHAPES, Shapes, shapes_named
from bench.timing import COLD_BYTES, MAX_SETS, WARM_SETS, order_of, sets_for, summarise
from tests.bench.fixtures import case, record

OPS = [Op("fused", "act_mul"), Op("fused", "act"), Op("norm", "rms_norm")]


def test_help_names_every_option_and_table() -> None:
    text = parser().format_help()
    for word in ("--shapes", "--against", "--all", "--quick", "--plot", "--list", "--check-records", "--results-only", "peers/", *SHAPES):
        assert word in text


def test_list_shows_every_op_that_has_a_bench_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--all"]) == 0
    out = capsys.readouterr().out
    for op in all_ops():
        assert op.stem in out


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=lambda s: s.name)
def test_every_bench_file_declares_valid_cases_on_a_cpu(shapes: Shapes) -> None:
    for op in all_ops():
        found = op.cases(shapes)
        assert found, op.stem
        assert all(isinstance(one, Case) for one in found), op.stem


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "no family or op named 'nope'"),
        (["--shapes", "gpt5"], "--shapes is 'gpt5', expected one of default"),
        (["--against", "cutlass"], "--against names cutlass"),
    ],
)
def test_wrong_arguments_say_what_there_is(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_measuring_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().out


def test_check_records_exits_with_1_when_a_kernel_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.records.RESULTS", tmp_path)
    assert main(["--check-records"]) == 0
    records.write([record(family="common", stem="common/vec")], tmp_path)
    assert main(["--check-records"]) == 1
    assert "common/vec: measured at digest dddddddddddd" in capsys.readouterr().out


def test_results_only_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bench.records.RESULTS", "bench.records.ROOT"):
        monkeypatch.setattr(name, tmp_path)
    monkeypatch.setattr("bench.results_page.PAGE", tmp_path / "docs" / "results.md")
    monkeypatch.setattr("bench.serving.RESULTS", tmp_path / "serving.jsonl")
    records.write([record()], tmp_path)
    assert main(["--results-only"]) == 0
    assert (tmp_path / "docs" / "results.md").read_text(encoding="utf-8") == results_page.page([record()])


def test_select_takes_families_ops_and_stems() -> None:
    assert select([], OPS) == OPS
    assert select(["fused"], OPS) == OPS[:2]
    assert select(["act", "norm/rms_norm"], OPS) == OPS[1:]


def test_ops_are_found_by_their_files(tmp_path: Path) -> None:
    for path in ("norm/bench_b.py", "fused/bench_a.py", "fused/helper.py", "timing.py"):
        file = tmp_path / "bench" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert [op.stem for op in all_ops(tmp_path)] == ["fused/a", "norm/b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": 0}, "bytes is 0"),
        ({"matrix": "tf32"}, "matrix is 'tf32'"),
        ({"matrix": "bf16"}, "flops is 0"),
        ({"goal": Goal(ratio={"fa3": 1.0})}, r"goal.ratio names \['fa3'\]"),
    ],
)
def test_a_case_that_cannot_be_judged_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case(**change)


def test_case_names_must_be_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("module", (), {"cases": staticmethod(lambda shapes: [case(), case()])})
    monkeypatch.setattr(bench_case.importlib, "import_module", lambda name: module)
    with pytest.raises(ValueError, match="not unique"):
        OPS[0].cases(SHAPES["default"])


def test_shapes() -> None:
    assert SHAPES["default"].grid(4096) == [(1, 4096), (256, 4096), (8192, 4096), (1, 8192)]
    assert SHAPES["llama3-8b"].grid(14336) == [(1, 14336), (256, 14336), (8192, 14336)]
    assert shapes_named("smollm2").N == 576
    assert set(PUBLISHED) <= set(SHAPES)


def test_sets_make_l2_cold_from_a_megabyte_on() -> None:
    assert sets_for(49_152) == (WARM_SETS, False)
    for nbytes in (1_000_000, 30_000_000, 201_326_592, 1 << 31):
        n, cold = sets_for(nbytes)
        assert cold
        assert 2 <= n <= MAX_SETS
        assert n * nbytes > COLD_BYTES
    assert sets_for(10_000_000, l2_bytes=200_000_000)[0] == 61


def test_the_order_alternates_and_the_median_is_reported() -> None:
    assert order_of(0, ["a", "b", "c"]) == ["a", "b", "c"]
    assert order_of(1, ["a", "b", "c"]) == ["c", "b", "a"]
    found = summarise([3.0, 1.0, 2.0], "graph")
    assert (found.us, found.us_min, found.us_max, found.spread) == (2.0, 1.0, 3.0, 1.0)


def test_a_peer_library_that_is_not_there_is_not_installed(tmp_path: Path) -> None:
    vllm = peers.Vllm(tmp_path)
    assert vllm.missing() == "not installed"
    with pytest.raises(PeerMissing, match="not installed"):
        vllm.silu_and_mul(torch.ones(2, 4))
    assert peers.try_baseline(vllm.silu_and_mul, torch.ones(2, 4)) == "not installed"


def test_a_peer_library_that_does_not_load_says_so(tmp_path: Path) -> None:
    (tmp_path / peers.VLLM_LIBRARIES["_C"]).write_bytes(b"not a library")
    assert peers.Vllm(tmp_path).missing().startswith("does not load: ")


def test_a_baseline_that_raises_is_reported_not_fatal() -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no kernel image\nmore")

    assert peers.try_baseline(broken, 0) == "failed: RuntimeError: no kernel image"


def test_arguments_are_bound_by_the_names_of_the_schema() -> None:
    op = torch.ops.aten.softmax.int
    packet = type("packet", (), {"default": op})
    assert peers.bind(packet, {"self": 1, "dim": 2}) == (1, 2, None)
    with pytest.raises(PeerMissing, match="incompatible: no argument axis; needs dim: aten::softmax"):
        peers.bind(packet, {"self": 1, "axis": 2})
