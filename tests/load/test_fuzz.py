"""The short form of `make fuzz`: every kind of file, mutated without guidance; and that the fuzzer finds what it is there to find."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors import SafetensorError

from pyllm.load import safetensors_file
from pyllm.load.mapped import MappedFile
from tools import fuzz
from tools.fuzz_seeds import seeds
from tools.fuzz_targets import TARGETS, Files, Target

FILES = 1500


def mutants(name: str, seed: int) -> list[bytes]:
    r, pool = random.Random(f"{name} {seed}"), seeds(name)
    return [fuzz.mutate(r.choice(pool), r.choice(pool), r) for _ in range(FILES)]


def all_of(run: Target, files: list[bytes]) -> None:
    for data in files:
        run(data)


@pytest.mark.parametrize("name", TARGETS)
def test_good_files_are_accepted(name: str) -> None:
    run = TARGETS[name][0](Files())
    assert all(run(data) for data in seeds(name))
    assert sum(share for _, share in TARGETS.values()) == 100


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files(name: str) -> None:
    run = TARGETS[name][0](Files())
    accepted = sum(run(data) for data in mutants(name, 1))
    assert 0 < accepted < FILES


def test_a_missing_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check that tensors tile the data, the reference library refuses what we accept."""
    run = TARGETS["safetensors"][0](Files())
    monkeypatch.setattr(safetensors_file, "_check_tiling", lambda *_: None)
    with pytest.raises(SafetensorError):
        all_of(run, mutants("safetensors", 2))


def test_a_wrong_tensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is off by one element where the offset is odd."""
    original = MappedFile.tensor
    monkeypatch.setattr(MappedFile, "tensor", lambda self, begin, *rest: original(self, begin - begin % 2, *rest))
    files = seeds("safetensors") + mutants("safetensors", 3)
    shifted = [json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode() + b" " * pad for pad in (0, 1)]
    files += [len(h).to_bytes(8, "little") + h + b"\x07" for h in shifted]
    run = TARGETS["safetensors"][0](Files())
    with pytest.raises(AssertionError):
        all_of(run, files)


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "RESULTS", tmp_path / "fuzz.jsonl")
    monkeypatch.setattr(fuzz, "WORK", tmp_path / "work")
    line = {"target": "index", "files": 10, "outcome": "x"}
    fuzz.record([line, line | {"target": "gguf"}])
    fuzz.record([line | {"files": 20}])
    lines = [json.loads(text) for text in (tmp_path / "fuzz.jsonl").read_text().splitlines()]
    assert [(entry["target"], entry["files"]) for entry in lines] == [("gguf", 10), ("index", 20)]
    assert all(len(entry["sources"]) == 16 for entry in lines)


def test_the_recorded_run_found_nothing() -> None:
    """A million files over all kinds, with the outcome that there must be. It names the sources that it fuzzed."""
    lines = [json.loads(text) for text in fuzz.RESULTS.read_text().splitlines()]
    assert {line["target"] for line in lines} == set(TARGETS)
    assert sum(line["files"] for line in lines) >= 1_000_000
    assert all(line["outcome"] == "no crash, hang, over-allocation or wrong tensor" for line in lines)
    assert all(0 < line["accepted"] < line["files"] for line in lines)
