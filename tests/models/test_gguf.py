"""What a GGUF file says of its model and tokenizer is what runs, or the file is refused by key and value."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from benchmarks.gguf_files.shapes import SHAPES, tiny_config, tiny_model
from ctx_compress_rag.models import gguf_tensors
from ctx_compress_rag.models.gguf import gguf_tokenizer
from ctx_compress_rag.models.gguf_metadata import ARCHITECTURES, architecture_of, gguf_config
from ctx_compress_rag.models.gguf_tensors import changed, file_changes, read_gguf
from ctx_compress_rag.models.weights import own_tensors
from helpers.gguf import ARCHES, write_gguf
from helpers.marks import slowly

PROMPT = (torch.arange(520).unsqueeze(0) * 7 % 57) + 3
# Others are refused, or llama.cpp's converter leaves out what makes them others.
OTHERS = ("Llama 4", "Qwen3-Next", "Gemma 4", "Gemma 4, vectors per layer", "Jamba", "DeepSeek V2", "DeepSeek V3")
# Many layers; or what they are made of is in the others.
SLOW = {"Gemma 2, 46 layers as 27B", "EXAONE 4, windows as 32B", "Llama, scaled (linear)", "Mistral", "Ministral 3"}
SLOW |= {"Arcee", "Qwen 2 MoE", "Qwen 3", "Qwen 3, scaled (yarn)", "Qwen 3.5", "Gemma", "Gemma 2", "Gemma 3"}
SLOW |= {"Phi 3", "SmolLM3", "Granite", "Granite MoE", "Granite hybrid", "OLMo 2", "LFM2", "GLM 4", "Hunyuan"}
SLOW |= {"Ernie 4.5", "Seed-OSS", "StarCoder 2"}
NEWER = ("Qwen 3.5 MoE", "Granite hybrid MoE")
READ = [
    name
    for name in SHAPES
    if name not in OTHERS and not any(each in name for each in ("window", "every second", "false"))
]


def logits(model: Any, length: int = 40) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=PROMPT[:, :length]).logits
    return found


def test_each_architecture_that_is_read_has_a_shape() -> None:
    types = {tiny_config(name, 50).model_type for name in READ}
    assert {ARCHES.get(each, each) for each in types} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", slowly(READ, SLOW))
def test_the_model_is_the_one_that_was_written(name: str, tmp_path: Path) -> None:
    """Rotary scaling, biases, windows, scales, sizes of heads, experts: transformers computes what the file says.

    What is added to the model's matrices is added to the file's in its order.
    """
    if name in NEWER and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("an older transformers names its tensors otherwise, which is refused, or computes it less exactly")
    model = tiny_model(name, 60)
    write_gguf(model, tmp_path / "tiny.gguf")
    read = read_gguf(tmp_path / "tiny.gguf")[1]().eval()
    for length in (12, 40, *((520,) if "longrope" in name else ())):  # beyond windows, and with the long factors
        expected = logits(model, length)
        torch.testing.assert_close(logits(read, length), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    torch.manual_seed(1)
    added = {key: torch.randn_like(each) for key, each in own_tensors(model).items() if each.ndim > 1}
    with torch.no_grad():
        for key, each in own_tensors(model).items():
            each += added.get(key, 0)
    write_gguf(model, tmp_path / "other.gguf")
    before, after = (gguf.GGUFReader(tmp_path / file).tensors for file in ("tiny.gguf", "other.gguf"))
    changes = file_changes(gguf.GGUFReader(tmp_path / "tiny.gguf"), added, model.config)
    for old, new in zip(before, after, strict=True):
        made = changed(old.data, old.name, changes[old.name]) if old.name in changes else old.data
        np.testing.assert_allclose(made, new.data, atol=1e-5, rtol=1e-5, err_msg=old.name)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Phi 3", {"sliding_window": 8}),
        ("StarCoder 2", {"sliding_window": 8}),
        ("EXAONE 4", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_window_that_the_file_states(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(name, 60)
    wide = logits(model)
    model = type(model)(type(model.config).from_dict(model.config.to_dict() | changes)).eval()
    model.load_state_dict(tiny_model(name, 60).state_dict())
    write_gguf(model, tmp_path / "tiny.gguf")
    expected = logits(model)
    assert (expected - wide).abs().max() > 0.01 * wide.abs().max()
    torch.testing.assert_close(logits(read_gguf(tmp_path / "tiny.gguf")[1]().eval()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("Llama", {"expert_group_count": 8}, "llama.expert_group_count = 8"),
        ("Llama", {"a_key_of_next_year": 0.5}, "llama.a_key_of_next_year = 0.5"),
        ("Llama", {"attention.causal": False}, "llama.attention.causal = False"),
        ("Llama", {"attention.value_length": 8}, "llama.attention.value_length = 8"),
        ("Llama", {"attention.head_count": [4, 2]}, r"attention.head_count = \[4, 2\]"),
        ("Llama", {"attention.head_count_kv": [4, 2]}, r"attention.head_count_kv = \[4, 2\]"),
        ("Llama", {"attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ("Llama", {"feed_forward_length": 72}, r"'blk.0.ffn_\w+.weight' has the shape"),
        ("Llama", {"block_count": 1}, "has the tensor 'blk.1"),
        ("Llama", {"block_count": 3}, "misses the tensor 'blk.2"),
        ("Llama", {"rope.scaling.type": "dynamic"}, "rope.scaling.type = 'dynamic'"),
        ("Llama", {"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor = 2.0"),
        ("Llama, scaled as 3.1 (llama3)", {"rope.scaling.factor": 2.0}, "for each frequency"),
        ("Qwen 2", {"attention.sliding_window": 8}, "qwen2.attention.sliding_window = 8"),
        ("Granite", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned = False"),
        ("Mamba", {"ssm.dt_b_c_rms": True}, "mamba.ssm.dt_b_c_rms = True"),
        ("Llama", {"block_count": 100}, "block_count = 100 .*fetch it again"),
    ],
)
def test_what_transformers_cannot_compute_is_refused(name: str, keys: Any, said: str, tmp_path: Path) -> None:
    write_gguf(tiny_model(name, 60), tmp_path / "tiny.gguf", keys=keys)
    with pytest.raises(ValueError, match=said):
        read_gguf(tmp_path / "tiny.gguf")[1]()


def test_what_changes_no_answer_is_accepted(tmp_path: Path) -> None:
    """And what llama.cpp takes for granted: a key without its file's value means that one, not the config's default."""
    model = tiny_model("Llama", 60)
    keys = {"attention.causal": True, "rope.scaling.type": "none", "rope.scaling.factor": 8.0}
    missing = {"rope.freq_base": None, "rope.dimension_count": None, "attention.key_length": None, "vocab_size": None}
    write_gguf(model, tmp_path / "tiny.gguf", keys=keys | missing)
    torch.testing.assert_close(logits(read_gguf(tmp_path / "tiny.gguf")[1]().eval()), logits(model))


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="general.architecture = 'jamba'.*transformers folder"):
        architecture_of({"general.architecture": "jamba"})


def test_a_piece_of_a_model_is_refused() -> None:
    metadata = {"general.architecture": "gemma", "split.count": 2}
    metadata |= {f"gemma.{key}": 64 for key in ARCHITECTURES["gemma"].keys}
    for names in ({}, {"token_embd.weight": (60, 64)}):
        with pytest.raises(ValueError, match="llama-gguf-split --merge"):
            gguf_config(metadata, names, {})


@pytest.mark.parametrize("share", [0.0003, 0.1, 0.5, 0.999])
def test_a_cut_file_is_refused(share: float, tmp_path: Path) -> None:
    write_gguf(tiny_model("Llama", 60), file := tmp_path / "tiny.gguf")
    os.truncate(file, int(share * file.stat().st_size))
    with pytest.raises(ValueError, match="fetch it again"):
        read_gguf(file)


def test_lists_without_end_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_gguf(tiny_model("Llama", 60), file := tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_tensors, "_MOST_VALUES", 20)
    with pytest.raises(ValueError, match="fetch it again"):
        read_gguf(file)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = tiny_model("GLM 4 MoE", 60)
    write_gguf(model, tmp_path / "tiny.gguf", keys={"nextn_predict_layers": 1})
    del model.model.layers[1]
    torch.testing.assert_close(logits(read_gguf(tmp_path / "tiny.gguf")[1]().eval()), logits(model))


def test_an_answer_also_ends_at_the_end_of_a_turn(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("eos", 5), ("eot", 7), ("eom", 5))}
    write_gguf(tiny_model("Llama", 60), tmp_path / "tiny.gguf", keys=ends)
    assert read_gguf(tmp_path / "tiny.gguf")[1]().config.eos_token_id == [5, 7]


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SAMPLE = "It's 1874, isn't it? We'LL see 12345 bees.\n\nNew  line\r\n\ttab. def f(x):\n    return x ** 2  # १² 北京 ½"


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("gpt-2", []),
        ("smollm", [pre_tokenizers.Digits(individual_digits=True)]),
        ("llama-bpe", [pre_tokenizers.Split(Regex(LLAMA_3), "isolated")]),
        ("qwen2", [pre_tokenizers.Split(Regex(LLAMA_3.replace("{1,3}", "")), "isolated")]),
    ],
)
def test_text_is_split_as_the_file_names_it(name: str, splits: list[Any], tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Compared with the pre-tokenizers that the models' own `tokenizer.json` have; merges of this one join anything."""
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("gpt-2", "smollm"))
    bpe = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([SAMPLE[at : at + 9] for at in range(0, len(SAMPLE), 3)], trainer)
    joined = bpe.encode(SAMPLE).ids
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, own])
    expected = bpe.encode(SAMPLE).ids
    assert expected != joined
    merges = [" ".join(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    vocabulary = bpe.get_vocab()
    keys = {
        "tokenizer.ggml.tokens": [*sorted(vocabulary, key=vocabulary.__getitem__), "<s>"],
        "tokenizer.ggml.token_type": [1] * len(vocabulary) + [3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(vocabulary),
        "tokenizer.ggml.eos_token_id": len(vocabulary),
    }
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.eos_token_id": len(vocabulary),
    }
    write_gguf(tiny_model("Llama", 60), tmp_path / "tiny.gguf", keys=keys, vocabulary="gpt2")
    begins = [len(vocabulary)] if name == "llama-bpe" else []  # unless the file says otherwise
    assert gguf_tokenizer(tmp_path / "tiny.gguf", metadata)(SAMPLE)["input_ids"] == begins + expected


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "default"), ("gpt2", None), ("gpt2", "falcon"), ("llama", "default")]
)
def test_an_unknown_tokenizer_is_asked_for(kind: str, name: str | None, tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": kind, "tokenizer.ggml.pre": name}
    with pytest.raises(ValueError, match=f"{kind}.*{name}.*give tokenizer"):
        gguf_tokenizer(tmp_path / "tiny.gguf", metadata)
