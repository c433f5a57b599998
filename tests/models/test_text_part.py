"""The text part of checkpoints with images, against the whole models of transformers, from the files that those save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyllm.api.model import load_parts
from pyllm.layers import Decoder, bind, plan
from pyllm.load.checkpoint import open_checkpoint
from pyllm.models import TEXT_PARTS, spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

pytest.importorskip("transformers")

VISION = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1, image_size=28, patch_size=14)
WIDTHS = dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", dict(sliding_window=12, query_pre_attn_scalar=16), {}),
    "llama4": ("Llama4", dict(num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=12, floor_scale=9), WIDTHS),
    "mistral3": ("Mistral3", dict(model_type="mistral", sliding_window=None), dict(model_type="pixtral")),
    "mistral3-of-ministral3": ("Mistral3", dict(model_type="ministral3"), dict(model_type="pixtral")),
}


def make(name: str, folder: Path) -> Any:
    import transformers

    kind, text, vision = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{kind}Config")(text_config=oracle.SIZES | text, vision_config=VISION | vision)
    config.tie_word_embeddings = kind == "Gemma3"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval().float()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3 if p.dim() > 1 else 0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_saved_files_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model, ids = make(name, tmp_path), torch.arange(33) % oracle.SIZES["vocab_size"]
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    others = {k for k in checkpoint.tensors if not k.startswith("language_model.")}
    assert others and set(checkpoint.tensors) == others | {s for i in plan(spec) for s in i.sources}
    with torch.no_grad():
        whole = model.language_model if name == "llama4" else model  # the whole Llama 4 of transformers 5.24 fails without an image
        want = whole(input_ids=ids[None], use_cache=False).logits[0]
    bound, pages = bind(spec, checkpoint.tensors), Paged(spec, 1, 33)
    oracle.assert_logits(torch.cat([bound(pages.step([ids[a:b]])) for a, b in ((0, 15), (15, 16), (16, 33))]), want)


def test_a_head_that_differs_from_the_embedding_is_not_dropped(tmp_path: Path) -> None:
    make("mistral3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    message = r"tie_word_embeddings is set, but language_model\.lm_head\.weight differs from language_model\.model\.embed_tokens"
    with pytest.raises(ValueError, match=message):
        load_parts(tmp_path, progress=False)


SCOUT: dict[str, Any] = {
    "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192,
    "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
    "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 4, "num_key_value_heads": 8,
    "num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "use_qk_norm": True,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"}, "vocab_size": 202048,
}  # fmt: skip
GEMMA_4B: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip


def spec(name: str, text: Any, **outer: Any) -> Decoder:
    return spec_from_config({"architectures": [f"{name}ForConditionalGeneration"], "text_config": text} | outer)


@pytest.mark.filterwarnings("error")
def test_published_fields() -> None:
    """Of Llama 4 Scout and Gemma 3 4B, whose file leaves out even the number of heads."""
    scout = spec("Llama4", SCOUT, vision_config={"image_size": 336}, image_token_index=200092)
    assert scout.at == "language_model" and scout.head is not None
    assert [a.variant and a.variant.name for _, a in scout.attns()] == ["chunked"] * 3 + ["tempered"]
    gemma = spec("Gemma3", GEMMA_4B, mm_tokens_per_image=256)
    attns = [a for _, a in gemma.attns()]
    assert (attns[0].heads, attns[0].kv_heads, attns[0].head_dim, gemma.vocab_size, gemma.head) == (8, 4, 256, 262208, None)
    assert [a.window for a in attns] == [1024] * 5 + [None] and attns[0].rope != attns[5].rope


def test_what_stands_outside_of_the_text_config_rules() -> None:
    inner = GEMMA_4B | {"tie_word_embeddings": True}
    assert spec("Gemma3", inner, tie_word_embeddings=False).head is not None
    assert spec("Gemma3", GEMMA_4B | {"tie_word_embeddings": False}).head is not None
    with pytest.raises(ValueError, match="config: quantization_config is set .quant_method 'awq'"):
        spec("Gemma3", inner, quantization_config={"quant_method": "awq"})


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "text_config is None, expected an object"), ([], r"text_config is \[\], expected an object"),
     (GEMMA_4B | {"model_type": "gemma4"}, "text_config: model_type is 'gemma4', expected 'gemma3_text'"),
     (GEMMA_4B | {"hidden_size": -1}, "hidden_size is -1, expected a positive integer")],
)  # fmt: skip
def test_bad_text_configs_are_named(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec("Gemma3", text)


def test_each_architecture_has_a_case() -> None:
    kinds = {(f"{kind}ForConditionalGeneration", text.get("model_type")) for kind, text, _ in CASES.values()}
    expected = {(name, kind if len(kinds) > 1 else None) for name, kinds in TEXT_PARTS.items() for kind in kinds}
    assert kinds == expected
