"""Building blocks of a decoder: frozen declarations, bound to a checkpoint by `bind`. See docs/compose.md."""

from pyllm.layers.as_stored import as_stored
from pyllm.layers.attention import Attn, KvSlot
from pyllm.layers.bind import Bound, bind
from pyllm.layers.decoder import Decoder, Sub, Sum
from pyllm.layers.formats import Dense, Format, QuantPlan
from pyllm.layers.fp8 import Fp8
from pyllm.layers.linear import Embedding, Linear
from pyllm.layers.mla import MLA
from pyllm.layers.mlp import MLP
from pyllm.layers.moe import MoE
from pyllm.layers.norm import LayerNorm, Norm, Normed, RMSNorm
from pyllm.layers.rope import DynamicNtk, LinearScaling, Llama3, LongRope, Rope, Yarn
from pyllm.layers.spec import Part, PlanItem, Spec, Split, Transform, Weight, consecutive, plan, rewrite, walk

__all__ = [
    "MLA",
    "MLP",
    "Attn",
    "Bound",
    "Decoder",
    "Dense",
    "DynamicNtk",
    "Embedding",
    "Format",
    "Fp8",
    "KvSlot",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "MoE",
    "Norm",
    "Normed",
    "Part",
    "PlanItem",
    "QuantPlan",
    "RMSNorm",
    "Rope",
    "Spec",
    "Split",
    "Sub",
    "Sum",
    "Transform",
    "Weight",
    "Yarn",
    "as_stored",
    "bind",
    "consecutive",
    "plan",
    "rewrite",
    "walk",
]
