"""Every family of causal language models that transformers has, as a tiny model: either its tokens are those that
transformers' own attention gives, through three tiers, or it is refused in words that say why.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.exactness.cases import finish
from tests.families import tiny_config, tiny_model
from tests.random_models import random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.errors import UnsupportedModelError
from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.models.load import load_model
from triforce_core.models.refused import REFUSED as TABLE
from triforce_core.sampling.draw import Draw, draw_tokens

NUM_TOKENS = 24
REPOSITORY = Path(__file__).parents[4]
SETTINGS = Settings.model_validate(
    {
        "dtype": "float32",
        "max_sequences": 6,
        "target": {"kv_pool_tokens": 12_000, "prefill_chunk": 700},
        "retrieval": {"budget": 256, "refresh_every": 16},
    }
)
LENGTHS = (40, 1500, 4000)
PATTERN = {"layer_types": ["sliding_attention", "full_attention"]}
TOKENS = {"bos_token_id": 1, "eos_token_id": 255, "pad_token_id": 0}
# By model_type, what a tiny model of it needs besides; and models with other features of a family.
SERVED: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "beam": PATTERN | {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": PATTERN,
    "cohere2_moe": PATTERN,
    "ctrl": {},
    "cwm": PATTERN | TOKENS,
    "dots1": PATTERN | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": PATTERN,
    "exaone_moe": PATTERN,
    "flex_olmo": {},
    "flint": {},
    "gemma": {},
    "gemma3_text": PATTERN,
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt-sw3": {},
    "gpt_neox": {},
    "gpt_oss": PATTERN,
    "granite": {},
    "granite_swa": PATTERN,
    "granitemoe": {},
    "granitemoe_swa": PATTERN,
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "kolibri1": {},
    "laguna": {},
    "llama": {},
    "mellum": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": PATTERN,
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
}
WITH: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 RoPE": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
    "YaRN": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            }
        },
    ),
    "one window for all layers": ("mistral", {"sliding_window": 100}),
    "no window": ("mistral", {"sliding_window": None}),
    "a window longer than the text": ("mistral", {"sliding_window": 5000}),
    "Qwen 2 with its window on": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen 3 with its window on": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    "StarCoder 2 without a window": ("starcoder2", {"sliding_window": None}),
    "Gemma 3 of one window": ("gemma3_text", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 600}),
    "gpt-oss with sinks alone": ("gpt_oss", {"layer_types": ["full_attention"] * 2}),
    "OLMo 3 with a long window": ("olmo3", PATTERN | {"sliding_window": 1024}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "as many KV heads": ("llama", {"num_key_value_heads": 4}),
    "OPT with norms behind": ("opt", {"do_layer_norm_before": False}),
    "GPT-NeoX in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "tied embeddings": ("qwen3", {"tie_word_embeddings": True}),
}
CASES = {**{kind: (kind, special) for kind, special in SERVED.items()}, **WITH}
QUICK = [
    "llama",
    "qwen3",
    "mistral",
    "opt",
    "gpt_neox",
    "gemma3_text",
    "gpt_oss",
    "olmo3",
    "cohere2",
    "exaone4",
]


def drawn_by_transformers(model: PreTrainedModel, request: Request, output: tuple[int, ...]) -> list[int]:
    """The tokens that transformers' own attention gives after the prompt and each part of the output."""
    text = torch.tensor([[*request.prompt, *output[:-1]]])
    with torch.inference_mode():
        logits = model(input_ids=text, use_cache=False, logits_to_keep=len(output)).logits[0]
    first = len(request.prompt)
    return draw_tokens(logits, [Draw(request.sampling, request.seed, first + i) for i in range(len(output))])


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *((name, LENGTHS[:2]) for name in QUICK),
        *(pytest.param(name, LENGTHS, marks=pytest.mark.slow) for name in CASES),
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(name: str, lengths: tuple[int, ...], tmp_path: Path) -> None:
    kind, special = CASES[name]
    theirs = tiny_model(tiny_config(kind, **special))
    theirs.save_pretrained(tmp_path)
    theirs.set_attn_implementation("eager")
    ours = load_model(str(tmp_path), "target", "float32", "cpu")
    engine = local_engine(ours, with_noise(ours, 0.1), SETTINGS)
    requests = [
        Request(random_tokens(length, seed=length), NUM_TOKENS, sampling, length, (4, 2))
        for length in lengths
        for sampling in (GREEDY, SamplingParams(0.8, top_p=0.9))
    ]
    outcome = finish(engine, requests)
    for request, tokens in zip(requests, outcome.tokens, strict=True):
        assert list(tokens) == drawn_by_transformers(theirs, request, tokens)
    assert all(tallies[0].proposed for tallies in outcome.tallies)


# What the refusal says, and of which kinds.
OWN = "its attention cannot be replaced"
REFUSED: dict[str, list[str]] = {
    "kv_lora_rank": [
        *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"),
    ],
    "layer_types": [
        *("axk2", "bailing_hybrid", "bamba", "deepseek_v32", "deepseek_v4", "falcon_h1", "falcon_mamba", "glm_moe_dsa"),
        *(
            "granitemoehybrid",
            "hy_v4",
            "inkling2_text",
            "inkling_text",
            "jamba",
            "kimi_linear",
            "lfm2",
            "lfm2_moe",
            "lfm3",
        ),
        *("llama4_text", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "qwen4_exp_text", "recurrent_gemma", "zamba", "zamba2", "zaya"),
    ],
    "made of parts": [
        *("blt", "dbrx", "dots3_note", "emu3", "fuyu", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2"),
        *("gemma4_unified_assistant", "llama4", "mllama", "moshi", "moss_transcribe_diarize", "phi4_multimodal"),
        *("qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    ],
    "is_heterogeneous": ["dots3_note_text", "gemma4_text", "gemma4_unified_text"],
    "attn_logit_softcapping": ["gemma2", "vaultgemma"],
    "is_encoder_decoder": ["blenderbot", "musicgen", "musicgen_melody", "plbart", "whisper"],
    "computes attention in a way": ["bloom", "mpt"],
    "names no causal language model": ["bert-generation"],
    "must be a whole number": ["cpmant", "rwkv", "xlnet", "xlstm"],
    "KV of shape": [
        *("bart", "blenderbot-small", "gpt_bigcode", "jetmoe", "marian", "mbart", "mimo_v2_flash"),
        "pegasus",
    ],
    OWN: [
        *("bert", "big_bird", "bigbird_pegasus", "camembert", "codegen", "data2vec-text", "diffllama", "doge"),
        *(
            "electra",
            "ernie",
            "falcon",
            "gpt_neox_japanese",
            "gptj",
            "hrm_text",
            "megatron-bert",
            "mvp",
            "openai-gpt",
            "prophetnet",
        ),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "xglm", "xlm", "xlm-roberta"),
        *("xlm-roberta-xl", "xmod"),
    ],
}
# Of these no tiny model can be made, or transformers has no way to make one of the text part alone.
UNKNOWN = {"cohere_compass_text", "gemma3n_text", "gemma4_assistant", "gpt_neo", "modernbert-decoder", "reformer"}
WHOLES = {"gemma3"}  # test_kinds.py has it
MOST = 20_000_000  # weights of a tiny model; of a larger one the configuration is tried


@pytest.mark.ci
@pytest.mark.parametrize("kind", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*SERVED} - UNKNOWN - WHOLES))
def test_others_are_refused_in_words_that_say_why(kind: str, tmp_path: Path) -> None:
    words = next(words for words, kinds in REFUSED.items() if kind in kinds)
    saved(kind, tmp_path)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model(str(tmp_path), "target", "float32", "cpu")
    message = str(refusal.value)
    assert words in message
    assert any(message.endswith(row.way_out) for row in TABLE), "what to do instead"


def saved(kind: str, folder: Path) -> None:
    """A tiny model of this kind, or its configuration alone if it would be large or cannot be made small."""
    try:
        config = tiny_config(kind, **({"layer_types": ["conv", "full_attention"]} if kind.startswith("lfm2") else {}))
        with torch.device("meta"):
            weights = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    except Exception:  # the code of any kind of model
        weights, config = MOST + 1, AutoConfig.for_model(kind)
    if weights > MOST:
        AutoConfig.for_model(kind).save_pretrained(folder)
    else:
        tiny_model(config).save_pretrained(folder)


def test_the_page_names_the_families() -> None:
    """docs/models.md has what this file tests."""
    page = (REPOSITORY / "docs" / "models.md").read_text()
    served, refused = (section.split("\n## ")[0] for section in page.split("## By family")[1].split("Refused:"))
    assert set(re.findall(r"`([^`]+)`", served)) == {"model_type", *SERVED, *WHOLES}
    assert set(re.findall(r"`([^`]+)`", refused)) == {kind for kinds in REFUSED.values() for kind in kinds}
