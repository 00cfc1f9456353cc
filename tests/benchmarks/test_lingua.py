"""The baseline LLMLingua-2: its own package, on tiny models of random weights."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from benchmarks.scoring.lingua import LLMLingua2
from ctx_compress_rag.evaluation.baselines import count_tokens

PASSAGES = [
    "Dr. Olu Vane was born in Kessmar in 1903. She loved the sea. Her first job was at the salt works of Pell.",
    "Kessmar is a harbour town. Its ferry leaves at dawn.\n\nThe mayor of Kessmar is Ilse Brandt. It rains often.",
    "",
    "Pell lies inland and trades in salt, which is sold at the market of Kessmar on the first day of the month.",
]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 2}


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
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[*special.values()], show_progress=False)
    tokenizer.train_from_iterator(PASSAGES, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    shape = BertConfig(vocab_size=tokenizer.get_vocab_size(), initializer_range=0.5, **SHAPE)
    BertForTokenClassification(shape).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("budget", [0, 1, 5, 20, 10_000])
def test_the_budget_is_spent_on_the_passages_own_words(bert_folder: Path, tiny_tokenizer: Any, budget: int) -> None:
    kept = LLMLingua2(str(bert_folder)).shorten(PASSAGES, tiny_tokenizer, budget)
    spent = sum(count_tokens(text, tiny_tokenizer) for text in kept)
    assert spent <= budget
    if budget == 10_000:
        assert kept == PASSAGES
        return
    assert spent >= 0.75 * budget - 2
    for text, passage in zip(kept, PASSAGES, strict=True):
        left = iter(re.findall(r"\w+", passage))
        *whole, last = re.findall(r"\w+", text) or [""]
        # A budget may end within a word, which is then its passage's last.
        assert all(word in left for word in whole) and any(word.startswith(last) for word in [*left, ""])
