"""Reconstruction (ArcAligner, stage I) and its perplexity, token by token with transformers' own model."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.scoring.perplexity import perplexity_table, reconstruction_perplexity
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.text.templates import PARAPHRASES
from ctx_compress_rag.training.examples import passage_examples
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.stages.answer import AnswerCollator, LikelihoodLoss
from helpers.models import widen
from helpers.ram import after_hole, plain_ids

PASSAGES = [
    "Orla Reedwen keeps a goat. She lives in Kormoor.",
    "Kormoor lies on the river Halen.",
    "Pell trades in salt.",
]
TEMPLATE = PARAPHRASES[0]


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Callable[..., Any]) -> Any:
    made = make_tiny_bundle(seed=2)
    widen(made.backbone.model, std=0.3)  # so wide that every input and adapter matters
    return made


@torch.no_grad()
def plain_losses(model: Any, embed: Any, prompt: Tensor, answer: list[int]) -> list[float]:
    """-log p of each answer token (eq. 10), one forward pass for each, in float64."""
    losses = []
    for i, token in enumerate(answer):
        context = torch.cat([prompt, embed(torch.tensor(answer[:i], dtype=torch.long))])
        log_p = model(inputs_embeds=context[None]).logits[0, -1].double().log_softmax(-1)
        losses.append(-float(log_p[token]))
    return losses


def slot_losses(bundle: Any, passage: str, ratio: int, template: str = TEMPLATE) -> list[float]:
    embed = bundle.backbone.embeddings
    before, after = template.split("{context}")
    user = plain_ids(bundle, f"<|user|>{before}")
    slots = bundle.embed(bundle.compress([passage], ratio)[0])
    rest = after_hole(bundle, after + "<|assistant|>")
    prompt = torch.cat([embed(torch.tensor(user)), slots, embed(torch.tensor(rest))])
    with bundle.soft_decoder(torch.zeros(1, 1, dtype=torch.bool)) as model:
        return plain_losses(model, embed, prompt, plain_ids(bundle, passage + "<|end|>"))


def text_losses(bundle: Any, passage: str, given: str) -> list[float]:
    embed = bundle.backbone.embeddings
    prompt = embed(torch.tensor(plain_ids(bundle, f"<|user|>{TEMPLATE.replace('{context}', given)}<|assistant|>")))
    with bundle.text_decoder() as model:
        return plain_losses(model, embed, prompt, plain_ids(bundle, passage + "<|end|>"))


def test_paraphrases_are_those_of_table_7() -> None:
    table = [
        "Background: [B]. This is equivalent to: [T].",
        "Rewrite the background in your own words: [B] \N{RIGHTWARDS ARROW} [T].",
        "Provide a restatement of the background: [B]. Return: [T].",
        "[B] is a paraphrase of what? Answer with: [T].",
        "These two expressions convey the same meaning: (1) [B] (2) [T].",
        "Restate [B] using a single sentence. Output only [T].",
    ]
    assert [template.replace("{context}", "[B]") + " [T]." for template in PARAPHRASES] == table


def test_the_loss_is_the_likelihood_of_the_passage(bundle: Any) -> None:
    """Eq. 10, mean over the batch's tokens, summed over ratios."""
    objective = LikelihoodLoss(bundle)
    objective.ratios = [4, 8]
    builder = TrainingPromptBuilder(bundle.tokenizer, 65)
    batch = AnswerCollator(builder, [TEMPLATE], 64, seed=0, recites=True)(
        passage_examples([Example(tuple(PASSAGES), ())])
    )
    total = 0.0
    for ratio in objective.ratios:
        losses = [loss for passage in PASSAGES for loss in slot_losses(bundle, passage, ratio)]
        total += sum(losses) / len(losses)
    assert float(objective(**batch)["loss"].detach()) == pytest.approx(total, rel=1e-4)


def test_each_passage_is_a_row_of_its_own(tiny_bundle: Any) -> None:
    """With a paraphrase of its own, always the same one; all of them are drawn."""
    turn = (Turn("Which pet?", ("a goat",)),)
    many = [Example((f"Passage {number} of many.", "Shared."), turn) for number in range(40)]
    rows = passage_examples(many)
    assert [p for row in rows for p in row.passages] == ["Passage 0 of many.", "Shared."] + [
        example.passages[0] for example in many[1:]
    ]
    collate = AnswerCollator(TrainingPromptBuilder(tiny_bundle.tokenizer, 65), PARAPHRASES, 64, seed=0, recites=True)
    batch = collate(rows)
    assert batch["prompts"].passages == [[i] for i in range(41)]
    prompts = set()
    for row, passage in zip(batch["prompts"].prompts, batch["passages"], strict=True):
        assert torch.cat(row.ids)[torch.cat(row.answers)].tolist() == plain_ids(tiny_bundle, passage.text + "<|end|>")
        parts = [tiny_bundle.tokenizer.decode(i[~flags]) for i, flags in zip(row.ids, row.answers, strict=True)]
        prompts.add("".join("{context}".join(parts).split()))
    assert prompts == {"".join(f"<|user|>{template}<|assistant|>".split()) for template in PARAPHRASES}
    assert torch.equal(
        torch.cat(collate(rows[7:8])["prompts"].prompts[0].ids), torch.cat(batch["prompts"].prompts[7].ids)
    )


def test_a_long_passage_is_cut_and_said_again_as_cut(tiny_bundle: Any) -> None:
    long = passage_examples([Example(("Kormoor lies on the river Halen. " * 20,), ())])
    batch = AnswerCollator(TrainingPromptBuilder(tiny_bundle.tokenizer, 33), PARAPHRASES[:1], 32, seed=0, recites=True)(
        long
    )
    [passage] = batch["passages"]
    assert len(passage.ids) == 32
    [row] = batch["prompts"].prompts
    answer = torch.cat(row.ids)[torch.cat(row.answers)].tolist()
    assert answer == plain_ids(tiny_bundle, passage.text + "<|end|>")


def test_perplexity_is_the_exponent_of_the_mean_loss(bundle: Any) -> None:
    expected = [
        ("full text", None, [text_losses(bundle, passage, passage) for passage in PASSAGES]),
        ("no context", None, [text_losses(bundle, passage, "") for passage in PASSAGES]),
        ("soft context", 4, [slot_losses(bundle, passage, 4) for passage in PASSAGES]),
        ("soft context", 16, [slot_losses(bundle, passage, 16) for passage in PASSAGES]),
    ]
    made = reconstruction_perplexity(bundle, PASSAGES, [4, 16], batch_size=2, progress=False)
    assert len(made) == len(expected)
    for score, (system, ratio, rows) in zip(made, expected, strict=True):
        losses = [loss for row in rows for loss in row]
        assert (score.system, score.ratio) == (system, ratio)
        assert score.value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
    assert len({round(math.log(score.value), 2) for score in made}) == 4  # what it is given shows
    assert perplexity_table(made).splitlines()[4] == f"| soft context | 4x | {made[2].value:.4g} |"
