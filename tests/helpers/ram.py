"""Tiny RAM bundles and stores, and the paper's equations written out for them, token by token, in float64."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag import Bundle, SoftContextStore
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.methods.ram import RamConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.store.marker import Marker, marked_passages, read_parts
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.stages.ram import RamCollator, RamLoss
from helpers.models import draw_lora, tiny_config, tiny_llama

FROZEN = {"mode": "frozen"}
EXAMPLES = [
    Example(
        ("Orla Reedwen keeps a goat as a pet and lives by the mill.", "Kormoor lies on the river Halen, near Dun."),
        (Turn("Which pet does Orla keep?", ("a goat",)),),
    ),
    Example(
        ("Kormoor lies on the river Halen, near Dun.",),
        (Turn("Which river?", ("Halen",)), Turn("Is it a town?", ("yes", "no"))),
    ),
]
PLAIN = "{context}\n\n{question}"
KEY = b"k" * 32
PASSAGES = [
    "The harbour of Velmora was built by Oda Brink in 1612, and its lighthouse still burns whale oil.",
    "Tarin Holt keeps bees on the roof of the town hall; the honey is sold under the name of Old Gold.",
    "Oda Brink was a mason.",
]
QUESTION = "Who built the harbour of Velmora?"


def ram_bundle(tokenizer: Any, seed: int = 0, segment_tokens: int = 4, tied: bool = True, **method: Any) -> Bundle:
    """A RAM bundle with random weights, large enough that what each input says shows; keywords are RamConfig's."""
    torch.manual_seed(seed)
    model = tiny_llama(tokenizer, tie_word_embeddings=tied)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)
    sizes = {"base_ratio": segment_tokens, "ratios": [2, 4, 8], "window": 16 * segment_tokens}
    config = tiny_config(method=RamConfig(segment_tokens=segment_tokens, **method), **sizes)
    bundle = Bundle.build(config, Backbone(model, tokenizer))
    bundle.reader.initialize(1.0)
    return bundle


def plain_ids(bundle: Bundle, text: str) -> list[int]:
    ids: list[int] = bundle.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def after_hole(bundle: Bundle, text: str) -> list[int]:
    """Ids of text that follows slots: the tiny tokenizer puts a space before text that follows a special token."""
    return plain_ids(bundle, "<|user|>" + text)[1:]


def plain_segments(bundle: Bundle, text: str) -> list[list[int]]:
    """A passage's token ids in equal chunks."""
    size, ids = bundle.config.base_ratio, plain_ids(bundle, text)
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def plain_states(encoder: Any, ids: Sequence[int]) -> Tensor:
    """Last hidden states of a text read alone, by transformers itself: (tokens, dim), float64."""
    with torch.no_grad():
        hidden: Tensor = encoder(input_ids=torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    return hidden.double()


def plain_cosine(a: Tensor, b: Tensor) -> float:
    return float(sum(a * b)) / math.sqrt(float(sum(a * a)) * float(sum(b * b)))


def plain_mean(states: Tensor) -> Tensor:
    """Eq. 1."""
    return torch.stack([*states]).sum(0) / len(states)


def plain_skim(states: Tensor, question: Tensor) -> Tensor:
    """Eq. 4."""
    weights = [math.exp(plain_cosine(state, question)) for state in states]
    return torch.stack([weight / sum(weights) * state for weight, state in zip(weights, states, strict=True)]).sum(0)


def plain_choice(
    question: Tensor, means: Sequence[Tensor], lengths: Sequence[int], ratio: int, size: int
) -> list[bool]:
    """Eq. 2 and 3: segments of the largest probabilities, as many tokens as k whole ones have."""
    exponentials = [math.exp(plain_cosine(question, mean) / 0.1) for mean in means]
    probabilities = [e / sum(exponentials) for e in exponentials]
    k = math.floor(sum(lengths) / (ratio * size))
    kept = [False] * len(means)
    for i in sorted(range(len(means)), key=lambda i: -probabilities[i]):
        if sum(n for n, yes in zip(lengths, kept, strict=True) if yes) + lengths[i] > k * size:
            break
        kept[i] = True
    return kept


def collator(bundle: Bundle) -> RamCollator:
    return RamCollator(
        TrainingPromptBuilder(bundle.tokenizer), [PLAIN], 512, seed=0, segment_tokens=bundle.config.base_ratio
    )


def objective(bundle: Bundle, ratio: int = 2, **options: Any) -> RamLoss:
    loss = RamLoss(bundle, TrainingPromptBuilder(bundle.tokenizer), **options)
    loss.ratios = [ratio]
    return loss


def move(bundle: Bundle) -> None:
    """Random numbers in what training starts at zero or at another module's values."""
    torch.manual_seed(5)
    with torch.no_grad():
        draw_lora(bundle.backbone.model, 0.1)
        for module in (bundle.compressor, bundle.reader):
            for parameter in module.parameters():
                if parameter is not bundle.backbone.embeddings.weight:
                    parameter.add_(0.05 * torch.randn_like(parameter))


def close_bundle(tokenizer: Any) -> Bundle:
    """A RAM bundle with a frozen encoder and LoRA on the decoder."""
    return ram_bundle(tokenizer, seed=2, encoder=FROZEN, decoder={"mode": "lora"})


def close_store(folder: Path, bundle: Bundle) -> SoftContextStore:
    """A store of the passages, for tests that do not mind what else is in it."""
    made = SoftContextStore(folder, bundle, codec="fp16", key=KEY)
    made.add(PASSAGES, progress=False)
    return made


def ask(store: SoftContextStore, texts: list[str] = PASSAGES, question: str = QUESTION, ratio: int = 2) -> list[str]:
    """Texts as the decoder is to read them for a question."""
    return mark_texts(store, texts, ratio=ratio, question=question)


def read(store: SoftContextStore, texts: list[str]) -> tuple[list[str], list[Marker]]:
    """The kept texts and the markers of marked passages, in order."""
    parts = [part for text in texts for part in read_parts(marked_passages(store.split(text)))]
    return [p for p in parts if isinstance(p, str)], [p for p in parts if isinstance(p, Marker)]
