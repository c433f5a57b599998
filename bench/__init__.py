"""Benchmarks of every op against the peers and the physical limit: `python -m bench --help`."""

from __future__ import annotations

from bench.case import Case, Goal, PeerMissing, compiled

__all__ = ["Case", "Goal", "PeerMissing", "compiled"]
