"""Model folders that this engine cannot serve rightly: each is refused before Ray starts, in one line that says what to
do instead, and `triforce doctor` says the same.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig

from deploy.checks import CHECKS
from tests.command_line import Refusals
from tests.random_models import random_model
from triforce_core.config import load_settings
from triforce_core.demo import weights_dir
from triforce_core.errors import InvalidValueError, TriForceError, UnknownModelError, UnsupportedModelError
from triforce_core.models.files import (
    check_tokenizer,
    context_length,
    kv_shape,
    load_config,
    load_tokenizer,
    stop_token_ids,
)
from triforce_core.models.load import load_model
from triforce_core.models.refused import FILES, REFUSED, check_supported

KERNEL = "kernels-community/flash-attn"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model().save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


# What a Llama's config.json says besides, and how the refusal names it.
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "encoder and decoder": ({"is_encoder_decoder": True}, "is_encoder_decoder = True"),
    "encoder": ({"architectures": ["BertForMaskedLM"]}, "architectures = ['BertForMaskedLM']"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "['LlamaForSequenceClassification']"),
    **{
        method: ({"quantization_config": {"quant_method": method, "bits": 4}}, f"quantization_config = {method!r}")
        for method in (
            *("modelopt", "metal", "fbgemm_fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes", "hqq", "torchao"),
            *("nvfp4", "quark", "nobody-knows"),
        )
    },
    "NVFP4 of ModelOpt": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "quantization_config = 'modelopt' (NVFP4)",
    ),
    "NVFP4 of compressed-tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
        "quantization_config = 'compressed-tensors' (nvfp4-pack-quantized)",
    ),
    "bitsandbytes of old": ({"quantization_config": {"load_in_8bit": True}}, "{'load_in_8bit': True}"),
    "compressed-tensors of old": ({"compression_config": {"format": "x"}}, "quantization_config = {'format': 'x'}"),
    "file of weights": ({"transformers_weights": "adapter_model.bin"}, "transformers_weights = 'adapter_model.bin'"),
    "layers of other shapes": (
        {"per_layer_config": {"0": {"head_dim": 16}, "1": {"head_dim": 32}}},
        "is_heterogeneous = True",
    ),
    "window": ({"sliding_window": -512}, "sliding_window = -512"),
    "layer types": ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types = ['linear_attention']"),
    "rope": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type = 'dynamic'"),
    "rope of a kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "rope_theta": 1e4}}},
        "rope_type = 'longrope'",
    ),
    "LongRoPE of Phi-3.5-MoE": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "long_mscale": 1.2,
                "short_mscale": 1.1,
            }
        },
        "rope_parameters = ['long_mscale', 'short_mscale']",
    ),
    "softcapping": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    "chunks": ({"attention_chunk_size": 64}, "attention_chunk_size = 64"),
    "latent attention": ({"kv_lora_rank": 32}, "kv_lora_rank = 32"),
    "heads": ({"num_attention_heads": -4}, "num_attention_heads = -4"),
    "layers": ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    "width": ({"hidden_size": 0}, "hidden_size = 0"),
    "vocabulary": ({"vocab_size": 0}, "vocab_size = 0"),
    "positions": ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    "no KV heads": ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
    "KV heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
}
WRAPPERS = (
    *("gemma3n", "llama4", "qwen3_vl_moe", "llava", "llava_next", "llava_onevision"),
    *("idefics", "idefics2", "idefics3", "paligemma", "internvl", "smolvlm", "glm4v", "aria"),
)
OWN = ("mpt", "bloom")  # attention of their own
OTHERS = ("mamba", "falcon_mamba", "rwkv", "jamba", "t5", "whisper", "vit", "clip", "pixtral", *OWN)


@pytest.mark.parametrize("name", SAID)
def test_what_a_configuration_says_is_refused_with_a_way_out(name: str, folder: Path) -> None:
    values, named = SAID[name]
    edit(folder, **values)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_config(str(folder), "target")
    message = str(refusal.value)
    row = next(row for row in REFUSED if row.way_out in message and row.rule in message)
    assert message.startswith(f"model {str(folder)!r}: ")
    assert named in message
    assert message.endswith(f" {row.rule}: {row.way_out}")


@pytest.mark.parametrize("kind", [*WRAPPERS, *OTHERS])
def test_models_of_other_kinds_are_refused(kind: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_config(str(tmp_path), "target")
    assert (f"model_type = {kind!r} computes attention in a way" in str(refusal.value)) == (kind in OWN)
    assert (f"model_type = {kind!r}, made of parts (" in str(refusal.value)) == (kind in (*WRAPPERS, "clip"))


def test_every_row_refuses_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_core.models.dequantise.find_spec", lambda _: None)
    packed = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    hit = set()
    for index, config in enumerate(
        [
            *(values for values, _ in SAID.values()),
            packed,
            *(CONFIG_MAPPING[kind]().to_dict() for kind in ("llava", "mpt")),
        ]
    ):
        path = tmp_path / str(index)
        random_model().config.save_pretrained(path)
        edit(path, **config)
        loaded = AutoConfig.from_pretrained(path)
        hit.add(next(at for at, row in enumerate(REFUSED) if row.what(loaded)))
    assert hit == set(range(len(REFUSED)))


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mixtral", "olmo2", "gemma", "granite"]
)
def test_models_that_are_served_are_not_refused(kind: str) -> None:
    check_supported(CONFIG_MAPPING[kind](), "a model")


@pytest.mark.slow
def test_no_configuration_of_transformers_ends_in_another_error() -> None:
    for kind in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # some have no defaults
            continue
        try:
            check_supported(config, kind)
            assert min(*kv_shape(config), context_length(config)) > 0, kind
        except UnsupportedModelError:
            pass


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[]", "null", "{}", "\x00", '{"model_type": 3}', '{"model_type": "nobody-knows"}']
    + [
        json.dumps({"model_type": "llama", field: value})
        for field in ("num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim", "rope_parameters")
        for value in (0, -1, "four", [4], {"a": 1})
    ],
)
def test_a_config_json_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TriForceError) as refusal:
        load_model(str(tmp_path), "target", "float32", "cpu")  # there are no weights
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


# -- files -------------------------------------------------------------------------------------------------------------

SHARD = "model-00001-of-00001.safetensors"


def indexed(folder: Path, **other: Any) -> None:
    """Divide the weights into shards, of which there is one; `other`: parts of the index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / SHARD)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, SHARD)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index | other))


def naming(file: Any) -> Callable[[Path], None]:
    return lambda folder: indexed(folder, weight_map={"model.norm.weight": file, "lm_head.weight": SHARD})


def index(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        indexed(folder)
        (folder / "model.safetensors.index.json").write_text(text)

    return write


def adapter(folder: Path, *, alone: bool) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "someone/else"}')
    if alone:
        (folder / "config.json").unlink()


DISTRIBUTED = "shard-00001-model-00001-of-00001.safetensors"


def distributed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / DISTRIBUTED)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (naming("pytorch_model.bin"), "'pytorch_model.bin'"),
        (naming("../elsewhere.safetensors"), "'../elsewhere.safetensors'"),
        (naming("/tmp/elsewhere.safetensors"), "'/tmp/elsewhere.safetensors'"),
        (naming("within/elsewhere.safetensors"), "'within/elsewhere.safetensors'"),
        (naming(3), "'3'"),
        (index("{"), "download it again"),
        (index("[]"), "download it again"),
        (partial(indexed, metadata=None), "download it again"),
        *(
            (partial(adapter, alone=alone), f"adapter_config.json {FILES[0].rule}: merge it into its model")
            for alone in (True, False)
        ),
        (distributed, f"{DISTRIBUTED} belongs to a distributed checkpoint: save it with save_pretrained"),
        (pickled, "pytorch_model.bin could run code when it is loaded, and there are no safetensors: take the"),
    ],
)
def test_files_that_are_refused(
    damage: Callable[[Path], None], named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was loaded"))
    damage(folder)
    with pytest.raises(UnknownModelError) as refusal:
        load_config(str(folder), "target")
    assert named in str(refusal.value)
    with pytest.raises(UnknownModelError) as again:
        CHECKS["weights"](load_settings(None, target={"model": str(folder)}))
    assert str(again.value) == str(refusal.value), "the doctor says the same"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ([], "no tokenizer.json is there, nor another tokenizer: copy tokenizer.json and tokenizer_config.json from"),
        (["tokenizer.model"], "tokenizer.model alone needs packages that are not installed: copy tokenizer.json from"),
        (["tokenizer.json"], "has no tokenizer that loads ("),
    ],
)
def test_tokenizers_that_are_refused(
    files: list[str], named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triforce_core.models.refused.find_spec", lambda _: None)
    for each in ("tokenizer_config.json", *files):
        (folder / each).write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UnknownModelError) as refusal:
        load_tokenizer(str(folder))
    assert str(refusal.value).startswith(f"target: '{folder}' {named}")
    if files != ["tokenizer.json"]:
        with pytest.raises(UnknownModelError, match=re.escape(named)):
            CHECKS["models"](load_settings(None, target={"model": str(folder)}, draft={"model": "ngram"}))


def test_packages_that_read_a_tokenizer_are_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_core.models.refused.find_spec", lambda _: True)
    (folder / "tokenizer.model").write_text("")
    check_tokenizer(str(folder))


@pytest.mark.parametrize("found", [256, [1, 300], -1, [1, -3]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_stop_tokens_outside_the_vocabulary(found: object, file: str, folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit(folder, eos_token_id=1)
    (folder / file).write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"eos_token_id": found}))
    with pytest.raises(InvalidValueError, match="must have token ids below 256, its vocabulary, as eos_token_id, not"):
        stop_token_ids(str(folder))


def test_shards_load(folder: Path) -> None:
    indexed(folder)
    load_model(str(folder), "target", "float32", "cpu")


def test_a_link_to_the_weights_loads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The hub's cache holds links."""
    indexed(folder)
    blob = tmp_path_factory.mktemp("blobs") / "blob"
    (folder / SHARD).rename(blob)
    (folder / SHARD).symlink_to(blob)
    load_model(str(folder), "target", "float32", "cpu")


def stored(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def float8(weights: dict[str, torch.Tensor]) -> None:
    """As quantised checkpoints have it: with the scale of each matrix as a weight of its own."""
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scale


def int8(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = weights[name].to(torch.int8)


@pytest.mark.parametrize(("change", "dtype"), [(float8, "F8_E4M3"), (int8, "I8")])
def test_weights_that_are_stored_quantised(
    change: Callable[[dict[str, torch.Tensor]], None], dtype: str, folder: Path
) -> None:
    stored(folder, change)
    with pytest.raises(UnsupportedModelError, match=rf"stored as {dtype} \(model\..*\), which is not supported: serve"):
        load_config(str(folder), "target")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate_proj.weight_scale", "model.layers.2.input_layernorm.weight"])
def test_weights_that_the_model_has_not(name: str, folder: Path) -> None:
    stored(folder, lambda weights: weights.update({name: torch.ones(64)}))
    with pytest.raises(UnknownModelError, match=f"holds 1 weights that LlamaForCausalLM has not: {name}"):
        load_model(str(folder), "target", "float32", "cpu")


def test_weights_that_transformers_leaves_out_on_purpose(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    stored(folder, lambda weights: weights.update({name: torch.ones(8)}))
    load_model(str(folder), "target", "float32", "cpu")


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize("value", [KERNEL, "flash_attention_2", {"": KERNEL}])
def test_an_implementation_that_a_configuration_names_is_not_used(
    field: str, value: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = "transformers.modeling_utils.lazy_import_flash_attention"
    monkeypatch.setattr(hub, lambda *_, **__: pytest.fail("a kernel was asked for"))
    edit(folder, **{field: value, "experts_implementation": KERNEL})
    load_model(str(folder), "target", "float32", "cpu")


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    (folder / "mine.py").write_text("raise SystemExit('run')")
    edit(folder, auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"})
    load_model(str(folder), "target", "float32", "cpu")
    edit(folder, model_type="mine")
    with pytest.raises(UnknownModelError, match="contains custom code"):
        load_config(str(folder), "target")


@pytest.mark.parametrize("text", ["[]", '{"eos_token_id": "x"}', '{"max_new_tokens": -3}'])
def test_a_generation_config_that_is_none(text: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(InvalidValueError, match=f"^target: '{folder}' "):
        stop_token_ids(str(folder))


# -- as users meet it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = 'gptq' is not supported: serve its"),
        ({"num_attention_heads": None}, "Field 'num_attention_heads' expected int, got NoneType"),
    ],
)
def test_commands_say_it_in_one_line(
    values: dict[str, Any], named: str, folder: Path, tmp_path: Path, refusals: Refusals
) -> None:
    edit(folder, **values)
    prompt, settings = tmp_path / "prompt", tmp_path / "settings.yaml"
    prompt.write_text("text")
    for file in weights_dir("target").glob("token*"):
        shutil.copy(file, folder)
    given = {
        "target": {"model": str(folder)},
        "draft": {"model": "ngram"},
        "server": {"port": 21101, "grpc_port": 21102},
    }
    settings.write_text(json.dumps(given))
    refusals.check([str(folder), named], "serve", "--config", str(settings))
    refusals.check([str(folder), named], "generate", "--config", str(settings), "--prompt-file", str(prompt))
    with pytest.raises(TriForceError) as said:
        CHECKS["models"](load_settings(settings))
    assert named in str(said.value)
