"""The baseline LLMLingua-2: its own package, on tiny models of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
)

from benchmarks.scoring.lingua import LLMLingua2
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.baselines import count

PASSAGES = [
    "Dr. Olu Vane was born in Kessmar in 1903. She loved the sea. Her first job was at the salt works of Pell.",
    "Kessmar is a harbour town. Its ferry leaves at dawn.\n\nThe mayor of Kessmar is Ilse Brandt. It rains often.",
    "",
    "Pell lies inland and trades in salt, which is sold at the market of Kessmar on the first day of the month.",
]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 2}


def bert(folder: Path) -> None:
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[*special.values()], show_progress=False)
    tokenizer.train_from_iterator(PASSAGES, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    shape = BertConfig(vocab_size=tokenizer.get_vocab_size(), initializer_range=0.5, **SHAPE)
    BertForTokenClassification(shape).save_pretrained(folder)


@pytest.fixture(scope="module", autouse=True)
def counting_tokenizer() -> Iterator[None]:
    """The package counts by a tokenizer that it downloads; llama-index has a copy of the file."""
    pytest.importorskip("llmlingua")
    import llama_index.core

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(Path(llama_index.core.__file__).parent / "_static" / "tiktoken_cache"))
        yield


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-bert-base-multilingual-cased"
    torch.manual_seed(0)
    bert(folder)
    return folder


def in_order(part: list[str], whole: list[str]) -> bool:
    left = iter(whole)
    return all(word in left for word in part)


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 10, 20, 40, 10_000])
def test_the_budget_is_spent_on_the_passages_own_words(bert_folder: Path, tiny_tokenizer: Any, budget: int) -> None:
    kept = LLMLingua2(str(bert_folder)).shorten(PASSAGES, tiny_tokenizer, budget)
    spent = sum(count(text, tiny_tokenizer) for text in kept)
    assert spent <= budget
    if budget == 10_000:
        assert kept == PASSAGES
        return
    assert spent >= 0.75 * budget - 2
    words = pre_tokenizers.BertPreTokenizer()
    for text, passage in zip(kept, PASSAGES, strict=True):
        own = [word for word, _ in words.pre_tokenize_str(passage)]
        said = [word for word, _ in words.pre_tokenize_str(text)]
        # A budget may end within a word, which is then its passage's last.
        assert in_order(said, own) or (in_order(said[:-1], own) and any(word.startswith(said[-1]) for word in own))


@pytest.mark.parametrize("budget", [10, 20])
def test_what_is_kept_is_what_the_model_finds_important(bert_folder: Path, tiny_tokenizer: Any, budget: int) -> None:
    """The probability of its second label, mean over a word's tokens, by transformers alone."""
    lingua, passage = LLMLingua2(str(bert_folder)), PASSAGES[0]
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    ids = tokenizer(passage, add_special_tokens=False)
    framed = torch.tensor([[tokenizer.cls_token_id, *ids["input_ids"], tokenizer.sep_token_id]])
    with torch.no_grad():
        logits = BertForTokenClassification.from_pretrained(bert_folder)(framed).logits[0, 1:-1]
    by_word: dict[int, list[float]] = {}
    for word, probability in zip(ids.word_ids(), logits.softmax(-1)[:, 1].tolist(), strict=True):
        by_word.setdefault(word, []).append(probability)
    importance = [sum(each) / len(each) for each in by_word.values()]
    words = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(passage)]
    [text] = lingua.shorten([passage], tiny_tokenizer, budget)
    said = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)][:-1]  # the last may be cut
    likeliest = sorted(range(len(words)), key=lambda i: -importance[i])
    assert len(said) >= 2
    assert any(said == [words[i] for i in sorted(likeliest[:n])][: len(said)] for n in range(len(said), len(words)))


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'my-model'"):
        LLMLingua2("my-model")
    with pytest.raises(ConfigError, match="xlm-roberta-large' cannot be loaded"):
        LLMLingua2(str(tmp_path / "xlm-roberta-large"))
