"""A tiny sentence-transformers model in a folder, and a tokenizer unlike the others."""

from pathlib import Path
from typing import Any

import torch

DIM = 24


def save_encoder(folder: Path, tokenizer: Any, seed: int = 0) -> Path:
    """A random BERT with mean pooling, as sentence-transformers saves it; the tokenizer may be any."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer.save_pretrained(folder / "bert")
    # Padding on the left would move a BERT's positions.
    AutoTokenizer.from_pretrained(folder / "bert", padding_side="right").save_pretrained(folder / "bert")
    torch.manual_seed(seed)
    shape = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIM,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    BertModel(shape).save_pretrained(folder / "bert")
    transformer = modules.Transformer(str(folder / "bert"), max_seq_length=128)
    SentenceTransformer(modules=[transformer, modules.Pooling(DIM, "mean")], device="cpu").save(str(folder))
    return folder


def unigram(texts: list[str]) -> Any:
    """A unigram tokenizer: other tokens and other offsets than byte-level BPE's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
