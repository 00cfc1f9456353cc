"""Adapters on Q/K/V projections: exact sums, rows of their own, peft's files, and adapted decoders."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.adaptation.adapt import adapted_decoder, demonstration_prompts
from ctx_compress_rag.adaptation.adapter import Adapter, apply_adapter, qkv_projections
from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.text.chat import answer_ids, chat_text
from ctx_compress_rag.text.tokenizing import bos_token_id, text_ids
from helpers import architectures
from helpers.adaptation import DEMONSTRATIONS, QUESTIONS, merged_copy, random_adapter
from helpers.decoding import by_transformers

SHORT = Sampling(max_tokens=8)


def _logits(model: Any, ids: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
    with torch.no_grad(), apply_adapter(model, adapter):
        return model(ids).logits


@pytest.mark.parametrize("name", architectures.NAMES)
def test_an_applied_update_equals_merged_weights(name: str) -> None:
    """On every architecture: base adapter and update, concatenated, give what the summed weights give."""
    model = architectures.model(name)
    base, update = random_adapter(model, 3, seed=1), random_adapter(model, 2, seed=2, scale=0.5)
    both = base.plus(update)
    assert both.rank == 5
    [ids] = architectures.random_ids(name, [11])
    expected = merged_copy(merged_copy(model, base), update)(ids[None]).logits
    plain = model(ids[None]).logits
    torch.testing.assert_close(_logits(model, ids[None], both), expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 0.1
    assert torch.equal(model(ids[None]).logits, plain)


def test_every_attention_block_is_adapted() -> None:
    """Names and widths as the config has them; Phi-3's fused projection is one."""
    llama, phi = architectures.model("Llama"), architectures.model("Phi3")
    wide = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32)}
    assert qkv_projections(llama) == {f"model.layers.{i}.self_attn.{n}": s for i in range(2) for n, s in wide.items()}
    assert qkv_projections(phi) == {f"model.layers.{i}.self_attn.qkv_proj": (64, 128) for i in range(2)}


def test_other_attention_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel.*none of them"):
        qkv_projections(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10)))
    llama = architectures.model("Llama")
    llama.model.layers[1].self_attn.kv_proj = llama.model.layers[1].self_attn.k_proj
    del llama.model.layers[1].self_attn.k_proj
    with pytest.raises(ConfigError, match=r"only \['q_proj', 'v_proj'\] in model.layers.1"):
        qkv_projections(llama)


@pytest.mark.parametrize("name", ["Llama", "Phi3"])
@pytest.mark.parametrize(("scale", "rank"), [(0.3, 2), (0.1, 4), (1.5, 3), (1.5, 4), (None, 8)])
def test_peft_loads_what_is_saved_to_same_outputs(name: str, scale: float | None, rank: int, tmp_path: Path) -> None:
    """Of a sum, too; and with the adapter's scale, though peft's lora_alpha, scale * rank, is a whole number."""
    model = architectures.model(name)
    if scale is None:
        adapter = random_adapter(model, 4, seed=7).plus(random_adapter(model, 4, seed=8, scale=1.0))
    else:
        adapter = random_adapter(model, rank, seed=9, scale=scale)
    adapter.save_pretrained(tmp_path, decoder="someone/decoder")
    [ids] = architectures.random_ids(name, [13])
    expected = merged_copy(model, adapter)(ids[None]).logits
    ours = _logits(model, ids[None], Adapter.from_pretrained(tmp_path, model))
    theirs = PeftModel.from_pretrained(architectures.model(name), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids[None]).logits, ours, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (rank, "someone/decoder")
    if scale is None:
        assert torch.equal(ours, _logits(model, ids[None], adapter)) and config["lora_alpha"] == 8


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "k_proj.lora_A.weight"),
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    whole = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]} | settings
    get_peft_model(architectures.model("Llama"), LoraConfig(**whole)).save_pretrained(tmp_path)
    with pytest.raises(BundleError, match=named):
        Adapter.from_pretrained(tmp_path, architectures.model("Llama"))
    with pytest.raises(BundleError, match="not a peft adapter"):
        Adapter.from_pretrained(tmp_path / "elsewhere", architectures.model("Llama"))


def _chats(questions: Any = QUESTIONS) -> list[Any]:
    return [question.chat() for question in questions]


def _texts(generations: Any) -> list[str]:
    return [generation.text for generation in generations]


def test_an_adapted_decoder_answers_as_one_with_merged_weights(decoder: Decoder, bundle: Any) -> None:
    adapter = random_adapter(bundle.backbone.model, 4, 11, size=0.5)
    changed, plain = adapted_decoder(decoder, adapter), Decoder(bundle)
    before = _texts(plain.generate(_chats(), SHORT))
    texts = _texts(changed.generate(_chats(), SHORT))
    merged = merged_copy(bundle.backbone.model, adapter)
    for chat, text in zip(_chats(), texts, strict=True):
        assert by_transformers(merged, bundle.tokenizer, chat, 8) == text
    assert texts != before
    pieces = list(changed.stream(_chats()[0], SHORT))
    assert pieces[-1].text == texts[0] == "".join(pieces[:-1])  # type: ignore[union-attr, arg-type]
    assert _texts(decoder.generate(_chats(), SHORT)) == _texts(plain.generate(_chats(), SHORT)) == before


def test_soft_contexts_are_read_with_the_update(bundle: Any, tmp_path: Path) -> None:
    """A prompt with slots goes to the reader's decoder, its adapter and the update on top of each other."""
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        decoder = Decoder(bundle, store)
        marked = _chats([replace(q, passages=tuple(mark_texts(store, q.passages, ratio=8))) for q in QUESTIONS])
        adapter = random_adapter(bundle.backbone.model, 4, seed=17)
        changed = adapted_decoder(decoder, adapter)
        [prompt] = decoder.preparer.prepare(marked[1:2])
        embedded = torch.cat([p if p.is_floating_point() else bundle.backbone.embeddings(p) for p in prompt.pieces])
        batch = splice_prompts(bundle.backbone.embeddings, [prompt])
        with torch.no_grad(), cast(Bundle, changed.bundle).soft_decoder(batch.slot_mask) as model:
            ours = model(**batch.model_inputs()).logits
        # The reader's LoRA merged by hand, then the update's.
        with bundle.backbone.use("reader") as model:
            lora = {
                n: m.scaling["reader"] * m.lora_B["reader"].weight @ m.lora_A["reader"].weight
                for n, m in model.named_modules()
                if hasattr(m, "lora_A")
            }
        plain = merged_copy(bundle.backbone.model, adapter)
        for name, change in lora.items():
            plain.get_submodule(name).weight += change
        logits = plain(inputs_embeds=embedded[None]).logits
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)

        alone = _texts(changed.generate(marked, SHORT)) + _texts(changed.generate(_chats(), SHORT))
        together = changed.generate([*marked, *_chats()], SHORT)
        assert _texts(together) == alone and [bool(each.slots) for each in together] == [True] * 3 + [False] * 3


def test_shown_answers_stand_as_the_one_that_is_asked_for(tiny_tokenizer: Any) -> None:
    """Without a chat template: after the cue, as `answer_ids` has it."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    shown, asked = DEMONSTRATIONS[1], QUESTIONS[0]
    bos = "" if bos_token_id(tokenizer) is None else tokenizer.bos_token
    answered = {"role": "assistant", "content": shown.answer}
    text = chat_text(tokenizer, [*shown.chat(), answered, *asked.chat()])
    assert text == (
        f"{bos}Kormoor lies on the river Halen.\n\nQuestion: Which river flows through Kormoor?\n"
        "Answer: the river Halen\n\n"
        "Ivo Stormley keeps a crow as a pet.\n\nQuestion: Which pet does Ivo Stormley keep?\nAnswer:"
    )
    alone = text_ids(tokenizer, chat_text(tokenizer, shown.chat())) + answer_ids(tokenizer, shown.answer)
    assert text_ids(tokenizer, text)[: len(alone)] == alone


def test_impossible_demonstrations_are_refused_by_name(decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="answer of demonstration 1 is empty"):
        demonstration_prompts(decoder, [DEMONSTRATIONS[0], replace(DEMONSTRATIONS[0], answer=" ")])
    long = replace(DEMONSTRATIONS[0], answer="a goat " * 600)
    with pytest.raises(ConfigError, match=r"demonstration 1 .* window of 1024"):
        demonstration_prompts(decoder, [DEMONSTRATIONS[0], long])
    with pytest.raises(ConfigError, match=r"passages are the string 'Orla keeps a goat.'"):
        Demonstration("Which pet does Orla keep?", "Orla keeps a goat.", "a goat")  # type: ignore[arg-type]
