"""What the numbers were measured on: GPU, driver, compiler, torch and commit, and the clocks and power during the rounds."""

from __future__ import annotations

import datetime
import re
import shutil
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.case import ROOT


@dataclass
class Monitor:
    """SM clock, power and temperature through NVML, sampled while the GPU works; without nvidia-ml-py the fields stay null."""

    device: int = 0
    clocks: list[int] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    celsius: list[int] = field(default_factory=list)
    _nvml: Any = None
    _handle: Any = None

    def __post_init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            # By UUID: NVML's numbering ignores CUDA_VISIBLE_DEVICES.
            uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception as error:  # an absent module and an absent driver differ by machine; the numbers do not depend on either
            self.reason = f"clocks and power not logged: {error}"
        else:
            self.reason = ""

    def sample(self) -> None:
        if self._nvml is None:
            return
        self.clocks.append(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        self.watts.append(self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)
        self.celsius.append(self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU))

    def take(self) -> dict[str, Any]:
        """Medians (and the least clock) since the last call."""
        found = {
            "sm_mhz": int(statistics.median(self.clocks)) if self.clocks else None,
            "sm_mhz_min": min(self.clocks) if self.clocks else None,
            "watts": round(statistics.median(self.watts)) if self.watts else None,
            "celsius": max(self.celsius) if self.celsius else None,
        }
        self.clocks, self.watts, self.celsius = [], [], []
        return found

    def driver(self) -> str | None:
        if self._nvml is None:
            return None
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def nvcc_version() -> str | None:
    """ "13.0.48" of the nvcc on PATH or in the toolkit's usual folder."""
    nvcc = shutil.which("nvcc") or next((str(p) for p in [Path("/usr/local/cuda/bin/nvcc")] if p.exists()), None)
    text = _output(nvcc, "--version") if nvcc else None
    found = re.search(r"V(\d+(?:\.\d+)+)", text or "")
    return found.group(1) if found else None


def describe(monitor: Monitor, command: str) -> dict[str, Any]:
    """The fields that all records of one run share."""
    dirty = _output("git", "status", "--porcelain", "--", "csrc", "pyllm", "bench")
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": monitor.driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": nvcc_version(),
        "commit": None if commit is None else commit + ("+" if dirty else ""),
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
    }
