"""Writes the README's table of numbers from the records in bench/results.

python -m tools.readme_numbers [--check]     --check writes nothing and fails when the table is stale
"""

from __future__ import annotations

import re
import sys

from bench import records
from tools.digest import ROOT

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- numbers: [^\n]*-->\n).*?(<!-- /numbers -->)", re.DOTALL)
ROWS = {
    ("rms_norm", "T=8192 N=4096 add bf16"): "residual add + RMSNorm, 8192 x 4096",
    ("rms_norm", "T=1 N=8192 add bf16"): "the same, one row of 8192",
    ("rms_norm", "T=8192 N=4096 add fp8 token bf16"): "residual add + RMSNorm + FP8 per token, 8192 x 4096",
    ("quantize_fp8", "T=8192 N=4096 token bf16"): "FP8 quantization per token, 8192 x 4096",
    ("act_mul", "T=8192 F=4096 silu bf16"): "SiLU(gate) * up, 8192 x 4096",
    ("qk_norm_rope_append", "T=8192 H=32 K=8 D=128 bf16 cache"): "RoPE + paged KV append, 8192 tokens, 32/8 heads of 128",
    ("qk_norm_rope_append", "T=8192 H=32 K=8 D=128 norm bf16 cache"): "the same with QK-norm",
    ("qk_norm_rope_append", "T=1 H=32 K=8 D=128 norm bf16 cache"): "QK-norm + RoPE + paged KV append, one token",
    ("decode_attention", "B=32 keys=4096 H=32 K=8 D=128 bf16 cache"): "paged decode attention, 32 x 4,096 keys, 32/8 heads of 128, bf16",
    ("decode_attention", "B=16 keys=65536 H=32 K=8 D=128 fp8 cache"): "the same, 16 x 65,536 keys, FP8 cache",
    ("prefill_attention", "n=2048 H=32 K=8 D=128 causal bf16"): "prefill attention, 8 x 2,048 tokens, 32/8 heads of 128, causal, bf16",
    ("prefill_attention", "n=16384 H=32 K=8 D=128 causal bf16"): "the same, 1 x 16,384 tokens",
    ("prefill_fp8", "B=1 N=16384 H=32 K=8 D=128 causal"): "the same, FP8",
    ("prefill_fp8", "B=2 N=8192 H=16 K=4 D=256 full"): "prefill attention, 2 x 8,192 tokens, 16/4 heads of 256, full, FP8",
    ("skinny_linear", "M=1 N=4096 K=4096 bf16"): "GEMM bf16, one row, 4096 x 4096 weights",
    ("skinny_linear", "M=1 N=4096 K=14336 bf16"): "the same, 4096 x 14336",
    ("fused_experts", "qwen3-30b-a3b T=64 bf16"): "MoE layer of Qwen3-30B-A3B, 64 tokens, bf16",
    ("fused_experts", "mixtral-8x7b T=8 bf16"): "MoE layer of Mixtral 8x7B, 8 tokens, bf16",
    ("dense_linear", "M=4096 N=28672 K=4096 bf16"): "GEMM bf16, 4096 x 28672 x 4096",
    ("dense_fp8", "M=4096 N=28672 K=4096 rows"): "GEMM FP8, scales per token and channel, 4096 x 28672 x 4096",
    ("sample_tokens", "B=1 V=128256 top-k top-p min-p bf16"): "top-k + top-p + min-p sampling, one row of 128,256",
    ("sample_tokens", "B=256 V=128256 top-k top-p min-p bf16"): "the same, 256 rows",
}


def table(found: list[records.Record]) -> str:
    """The rows above that have a record: time, share of the ceiling of that run, speed over the best peer that ran."""
    by = {(r["op"], r["case"]): r for r in found if r["shape"] == "default"}
    rows = [(what, by[key]) for key, what in ROWS.items() if key in by]
    if not rows:
        return "No records yet: `make gpu-bench` on a machine with a Hopper GPU writes them.\n"
    gpu, torch = rows[0][1]["gpu"], rows[0][1]["torch"]
    lines = [f"| {gpu}, torch {torch} | µs | of the ceiling | over the best peer |", "|---|---|---|---|"]
    for what, r in rows:
        lines.append(f"| {what} | {r['us']:{',.0f' if r['us'] >= 1000 else '.3g'}} | {share(r)} | {over(r)} |")
    return "\n".join(lines) + "\n"


def share(r: records.Record) -> str:
    """Of a copy of the same bytes, or of cuBLAS's rate, both measured in the same run; nothing where latency is all there is."""
    if r["share"] is None or r["bytes"] <= 50e6:
        return "-"
    return f"{100 * r['share']:.0f} % of {'a copy' if r['share_of'].startswith('copy') else 'the ' + r['share_of']}"


def over(r: records.Record) -> str:
    peers = {n: b["us"] for n, b in r["baselines"].items() if b.get("us")}
    best = min(peers, key=peers.__getitem__, default=None)
    return f"{peers[best] / r['us']:.2f}x ({best})" if best else "-"


def fresh(text: str) -> str:
    return BLOCK.sub(lambda m: m[1] + table(records.read()) + m[2], text)


def main() -> int:
    text = README.read_text(encoding="utf-8")
    new = fresh(text)
    if "--check" in sys.argv[1:]:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
