"""Stages of ArcAligner, ComprExIT, RAM and reconstruction; recipes against the papers."""

import json
import math
import re
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.scoring.perplexity import perplexity_table, reconstruction_perplexity
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.card import model_card
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.data.examples import Example, Turn, read_jsonl, write_jsonl
from ctx_compress_rag.errors import BundleError, ConfigError, DataError
from ctx_compress_rag.methods.ram import RamConfig
from ctx_compress_rag.text.templates import PARAPHRASES
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, passage_examples
from ctx_compress_rag.training.run import load_recipe, parse_recipe, run_recipe
from ctx_compress_rag.training.stages.answer import AnswerCollator, LikelihoodLoss, NextTokenCollator
from ctx_compress_rag.training.stages.compression import bundle_to_train
from ctx_compress_rag.training.stages.ram import RamCollator, RamLoss
from helpers import architectures
from helpers.arcaligner import LORA, make_reader, prompts, read
from helpers.methods import DIM, save_encoder
from helpers.models import widen
from helpers.ram import EXAMPLES, PLAIN, after_hole, collator, objective, plain_ids, ram_bundle
from helpers.training import report, settings_of, write_recipe


def test_ablations() -> None:
    """Without recursion: loops 0 over the same weights. Without gate: all loops for each slot. Without LoRA."""
    full = make_reader()
    batch = prompts(full)
    state = full.saved_state()
    once, always = make_reader(loops=0), make_reader(gate="open")
    for reader in (once, always):
        reader.load_saved_state(state)
    shut = make_reader()
    shut.load_saved_state(state | {n: p - 1e4 for n, p in state.items() if n.endswith(".2.bias")})
    assert torch.equal(read(once, batch).logits, read(shut, batch).logits)
    read(always, batch)
    always.trained_parameters()
    assert not any(p.requires_grad for p in always.gates.parameters())
    assert [(record[batch.slot_mask] == 3).all() for record in always.last_loops.values()] == [True, True]
    none = make_reader(lora=None, loops=0)
    with torch.no_grad():
        assert torch.equal(read(none, batch).logits, none.backbone.model(**batch.model_inputs()).logits)
    assert {name.split(".")[0] for name in none.saved_state()} == {"projection", "gates"}
    with pytest.raises(BundleError, match="reader"):
        none.load_saved_state(state)


def test_dropout_is_for_training_only() -> None:
    reader = make_reader(lora=LORA | {"dropout": 0.5}, loops=0)
    batch = prompts(reader)
    evaluated = read(reader, batch).logits
    reader.train()
    assert torch.equal(read(reader, batch).logits, evaluated)  # no gradients asked for
    with reader.decoder(batch.slot_mask) as model:
        assert not torch.equal(model(**batch.model_inputs()).logits, evaluated)


def test_a_fitted_map_gives_the_tokens_own_embeddings(decoder: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """From a token's slot, no worse than an affine map; a random map gives their size. One text spells an end token."""
    names = ("Orla", "Ada", "Bo", "Cy", "Pell", "Kormoor")
    texts = [f"{name} keeps {n} goats by the river of {other}." for name, other in pairwise(names) for n in range(4)]
    spelled = f"One {tiny_tokenizer.eos_token} two."
    examples = [Example((text,), (Turn("?", ("two",)),)) for text in [*texts, spelled]]

    def errors(fit_passages: int) -> tuple[float, float, float]:
        torch.manual_seed(0)
        recipe = parse_recipe(settings_of(decoder, "comprexit", tmp_path, fit_passages=fit_passages), "this")
        bundle = bundle_to_train(recipe, examples)
        ids = [token for text in texts for token in bundle.tokenizer(text, add_special_tokens=False)["input_ids"]]
        embeddings = bundle.backbone.embeddings(torch.tensor(ids)).double().numpy()
        softs = bundle.compress(texts, 1)
        slots = np.column_stack([np.concatenate([soft.slots for soft in softs]).astype(np.float64), np.ones(len(ids))])
        read = torch.cat([bundle.embed(soft) for soft in softs]).double().numpy()
        affine = slots @ np.linalg.lstsq(slots, embeddings, rcond=None)[0]
        error, least = (float(((made - embeddings) ** 2).mean() / embeddings.var()) for made in (read, affine))
        return error, least, float(np.linalg.norm(read) / np.linalg.norm(embeddings))

    random, _, size = errors(0)
    fitted, best, _ = errors(len(examples))
    assert fitted < best + 0.05 < 0.5 and random > best + 0.5 and 0.5 < size < 2
    with pytest.raises(ConfigError, match="fit_passages needs a map of two layers, which mean_pooling lacks"):
        bundle_to_train(parse_recipe(settings_of(decoder, "answer", tmp_path, fit_passages=2), "this"), examples)
    with pytest.raises(ConfigError, match="leave revision, teacher and fit_passages out"):
        changes = {"decoder": None, "bundle": "smollm2-135m", "fit_passages": 2}
        parse_recipe(settings_of(decoder, "answer", tmp_path, **changes), "this")


@pytest.fixture(scope="module")
def stages(decoder: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the three stages have been run, three steps each."""
    folder = tmp_path_factory.mktemp("stages")
    encoder = save_encoder(folder / "encoder", tiny_tokenizer)
    names = ("Orla", "Ada", "Bo", "Cy")
    write_jsonl(
        folder / "data.jsonl",
        [Example((f"{n} keeps a goat. {n} is old.",), (Turn(f"What does {n} keep?", ("a goat",)),)) for n in names],
    )
    optim = {"steps": 3, "learning_rate": 0.02, "final_learning_rate": 0.0, "schedule": "linear"}
    data = {"files": [str(folder / "data.jsonl")], "max_context_tokens": 64}
    method = {"name": "arcaligner", "encoder": str(encoder), "encoder_dim": DIM, "loops": 0, "gate_width": 4}
    method["lora"] = {"rank": 4, "alpha": 4}
    for name, stage, changes in (
        ("1", "reconstruction", {"method": method}),
        ("2", "answer", {"decoder": None, "bundle": str(folder / "1" / "bundle"), "method": None}),
        ("3", "answer", {"decoder": None, "bundle": str(folder / "2" / "bundle"), "method": method | {"loops": 2}}),
    ):
        common = {"base_ratio": 8, "ratios": [8], "data": data}
        run_recipe(write_recipe(decoder, stage, folder / name, optim, **common, **changes))
    return folder


def test_stages_go_on_from_each_other(stages: Path) -> None:
    """Projector and LoRA change in every stage, gates in the third alone, the decoder never."""
    bundles = [Bundle.from_pretrained(stages / stage / "bundle") for stage in "123"]
    states = [bundle.reader.saved_state() for bundle in bundles]
    parts = ({"projection", "lora"}, {"projection", "lora", "gates"})
    for (earlier, later), changing in zip(pairwise(states), parts, strict=True):
        assert earlier.keys() == later.keys()
        changed = {name.split(".")[0] for name in later if not torch.equal(later[name], earlier[name])}
        assert changed == changing
    first, *others = [bundle.backbone.own_state() for bundle in bundles]
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())
    counts = [report(stages / stage)["trained_parameters"] for stage in "123"]
    assert counts[0] == counts[1] < counts[2]
    gates = sum(p.numel() for p in bundles[2].reader.gates.parameters())
    assert counts[2] - counts[1] == gates


def test_a_card_names_the_data_of_all_stages_once(stages: Path) -> None:
    first, second = {"data": "novels", "license": "none"}, {"data": "questions", "license": "MIT"}
    told = {"recipe": {"sources": [second, first]}, "earlier": {"recipe": {"sources": [first]}}}
    card = model_card(Bundle.from_pretrained(stages / "1" / "bundle").config, told, "f")
    assert "| data | license |\n|---|---|\n| novels | none |\n| questions | MIT |\n\n## Limits" in card


def test_a_report_keeps_those_of_the_stages_before(stages: Path) -> None:
    last = Bundle.from_pretrained(stages / "3" / "bundle").report
    told = [last, last["earlier"], last["earlier"]["earlier"]]
    assert [each["recipe"]["output"] for each in told] == [str(stages / stage) for stage in "321"]
    assert "earlier" not in told[-1]
    assert "| Training steps | 9, in stages of 3, 3 and 3 |" in (stages / "3" / "bundle" / "README.md").read_text()
    assert "| Training steps | 3 |" in (stages / "1" / "bundle" / "README.md").read_text()


TEXT = "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast."


@given(length=st.integers(2, 90), context=st.integers(1, 60), continuation=st.integers(1, 60))
def test_next_token_cuts(tiny_tokenizer: Any, length: int, context: int, continuation: int) -> None:
    """A text's beginning is compressed, and what follows it is predicted; of a short text nothing is left out."""
    text = tiny_tokenizer.decode([(37 * i) % 500 + 20 for i in range(length)])
    whole = tiny_tokenizer(f"Pell.\n\n{text}", add_special_tokens=False)["input_ids"]
    batch = NextTokenCollator(tiny_tokenizer, context, continuation)([Example(("Pell.", text), (Turn("", ("",)),))])
    [row], [passage] = batch["prompts"].prompts, batch["passages"]
    beginning, (before, rest) = passage.ids, row.ids
    assert beginning + rest.tolist() == whole[: context + continuation]
    assert passage.text == tiny_tokenizer.decode(beginning)
    assert before.tolist() == [] and [a.tolist() for a in row.answers] == [[], [True] * len(rest)]
    wanted = len(beginning + rest.tolist()) * context // (context + continuation)
    assert len(beginning) == max(1, wanted) and len(rest) >= 1


def test_a_bos_stands_before_the_slots_and_single_tokens_are_refused() -> None:
    tokenizer = architectures.tokenizer("Llama")
    batch = NextTokenCollator(tokenizer, 8, 4)([Example((TEXT,), (Turn("", ("",)),))])
    [row] = batch["prompts"].prompts
    assert row.ids[0].tolist() == [tokenizer.bos_token_id] and not row.answers[0].any()
    unused = architectures.tokenizer("Phi3")  # it has a BOS, and puts it nowhere
    assert unused.bos_token_id is not None and unused("", verbose=False)["input_ids"] == []
    [row] = NextTokenCollator(unused, 8, 4)([Example((TEXT,), (Turn("", ("",)),))])["prompts"].prompts
    assert row.ids[0].tolist() == []
    with pytest.raises(DataError, match="'a'"):
        NextTokenCollator(tokenizer, 8, 4)([Example(("a",), (Turn("", ("",)),))])


def test_a_control_token_in_a_text_is_text() -> None:
    """As the store has it: the passage that is compressed in training is the one that is compressed in use."""
    tokenizer = architectures.tokenizer("Llama")
    text = f"{TEXT}{tokenizer.eos_token}{TEXT}"
    batch = NextTokenCollator(tokenizer, 200, 100)([Example((text,), (Turn("", ("",)),))])
    [row] = batch["prompts"].prompts
    read = [*batch["passages"][0].ids, *row.ids[1].tolist()]
    assert tokenizer.eos_token_id in tokenizer(text)["input_ids"]
    assert tokenizer.eos_token_id not in read and tokenizer.decode(read) == text


Values = dict[str, Any]


def optim(steps: int, batch_size: int, learning_rate: float, **more: Any) -> Values:
    own = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, **more}
    return {f"optim.{key}": value for key, value in own.items()}


LINEAR = {"final_learning_rate": 0, "schedule": "linear", "weight_decay": 0}
# Simple Context Compression, table 6.
POOLING: Values = {
    **optim(48_000, 32, 2e-4, final_learning_rate=2e-5, warmup_ratio=0.05, betas=(0.9, 0.95), weight_decay=0),
    **{f"method.{side}.{key}": 16 for side in ("encoder", "decoder") for key in ("rank", "alpha")},
    "method.encoder.mode": "lora", "method.decoder.mode": "lora",
    "optim.clip_norm": 1, "ratios": [4, 8, 16, 32, 64, 128], "curriculum": [], "reconstruction_weight": 0,
    "data.max_context_tokens": 1024, "data.max_answer_tokens": 256,
}  # fmt: skip
# ComprExIT, table 7 and appendix A.4: an epoch of a billion tokens; table 4: of 516,819 questions.
COMPREXIT: Values = {"ratios": [4], "window": 512, "data.max_context_tokens": 512}
TABLE_7 = LINEAR | {"warmup_ratio": 0.05, "clip_norm": 20, "micro_batch_size": 16}
SIZES = dict.fromkeys(("method.gate_dim", "method.slot_dim", "method.transport_dim"), 256)
SIZES |= {"method.segment_tokens": 128, "method.iterations": 30, "data.max_answer_tokens": 128}
# ArcAligner, tables 5 and 6: the batch is that of all GPUs, and steps are one epoch.
LARGE_LORA = {"method.lora.rank": 128, "method.lora.alpha": 32, "method.lora.dropout": 0.05}
RECONSTRUCTION = optim(200_000 // 256, 8 * 8 * 4, 2e-4, warmup_ratio=0.03, **LINEAR)
ANSWER = optim(90_447 // 64, 8 * 2 * 4, 2e-5, warmup_ratio=0.03, **LINEAR)
# Read As Human, section 4.1: one pass over the examples of five datasets; summaries of MultiNews keep their end.
RAM: Values = {
    **optim(5 * 20_000 // 32, 32, 1e-5, **LINEAR),
    "ratios": [2, 4, 8, 16, 32], "temperature": 0.1, "contrastive": True, "base_ratio": 50, "method.segment_tokens": 50,
    "method.encoder.mode": "full", "method.decoder.mode": "full",
    "data.max_context_tokens": 20_000, "data.max_answer_tokens": 2048,
}  # fmt: skip
PAPERS: dict[str, Values] = {
    "mean_pooling/compressor": POOLING,
    "compression_tokens/causal": POOLING | {"method.attention": "causal"},
    "compression_tokens/bidirectional": POOLING | {"method.attention": "bidirectional"},
    "comprexit/next_token": COMPREXIT | SIZES | optim(round(1e9 / 2048 / (512 + 128)), 2048, 1e-4, **TABLE_7),
    "comprexit/answer": COMPREXIT | optim(516_819 // 2048, 2048, 1e-4, **TABLE_7),
    "arcaligner/1_reconstruction": RECONSTRUCTION | LARGE_LORA | {"method.loops": 0},
    "arcaligner/2_answer": ANSWER | {"method": None, "bundle": Path("runs/arcaligner/1_reconstruction/bundle")},
    "arcaligner/3_gates": ANSWER | LARGE_LORA | {"method.loops": 3, "bundle": Path("runs/arcaligner/2_answer/bundle")},
    "ram/ram": RAM,
}


@pytest.mark.parametrize("name", PAPERS)
def test_shipped_recipes_hold_the_papers_values(name: str) -> None:
    recipe = load_recipe(name)
    assert {key: attrgetter(key)(recipe) for key in PAPERS[name]} == PAPERS[name]


PASSAGES = [
    "Orla Reedwen keeps a goat. She lives in Kormoor.",
    "Kormoor lies on the river Halen.",
    "Pell trades in salt.",
]
TEMPLATE = PARAPHRASES[0]


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Any) -> Any:
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
        assert np.concatenate(row.ids)[np.concatenate(row.answers)].tolist() == plain_ids(
            tiny_bundle, passage.text + "<|end|>"
        )
        parts = [tiny_bundle.tokenizer.decode(i[~flags]) for i, flags in zip(row.ids, row.answers, strict=True)]
        prompts.add("".join("{context}".join(parts).split()))
    assert prompts == {"".join(f"<|user|>{template}<|assistant|>".split()) for template in PARAPHRASES}
    [again] = collate(rows[7:8])["prompts"].prompts
    assert np.array_equal(np.concatenate(again.ids), np.concatenate(batch["prompts"].prompts[7].ids))


def test_a_long_passage_is_cut_and_said_again_as_cut(tiny_bundle: Any) -> None:
    long = passage_examples([Example(("Kormoor lies on the river Halen. " * 20,), ())])
    batch = AnswerCollator(TrainingPromptBuilder(tiny_bundle.tokenizer, 33), PARAPHRASES[:1], 32, seed=0, recites=True)(
        long
    )
    [passage] = batch["passages"]
    assert len(passage.ids) == 32
    [row] = batch["prompts"].prompts
    answer = np.concatenate(row.ids)[np.concatenate(row.answers)].tolist()
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
    shares = " | ".join(f"{share:.3f}" for share in made[2].right.values())
    assert perplexity_table(made).splitlines()[4] == f"| soft context | 4x | {made[2].value:.4g} | {shares} |"


@pytest.fixture(scope="module")
def ram(tiny_tokenizer: Any) -> Bundle:
    return ram_bundle(tiny_tokenizer)


def test_the_choice_itself_passes_no_gradient(tiny_tokenizer: Any) -> None:
    """Without skimmed vectors the encoder learns from the contrastive loss alone."""
    made = ram_bundle(tiny_tokenizer, skimming="none", decoder={"mode": "full"})
    assert made.reader.projection is None
    for contrastive in (False, True):
        loss = objective(made, contrastive=contrastive)
        loss(**collator(made)(EXAMPLES))["loss"].backward()
        grads = [p.grad for p in made.compressor.parameters() if p.requires_grad]
        assert grads and any(g is not None and bool(g.any()) for g in grads) == contrastive
        assert any(p.grad is not None and bool(p.grad.any()) for p in made.reader.parameters())


def test_a_reduction_is_drawn_for_each_question(ram: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    choose = ram.compressor.choose
    monkeypatch.setattr(ram.compressor, "choose", lambda *args: drawn.append(args[3]) or choose(*args))
    loss = objective(ram)
    loss.ratios = [2, 4, 8]
    with torch.no_grad():
        for examples in ([EXAMPLES], [[example] for example in EXAMPLES]):  # whole, and in micro-batches
            for loss.step in range(6):
                for micro in examples:
                    loss(**collator(ram)(micro))
    assert set(drawn) == {2, 4, 8}
    assert len(set(drawn[:3])) > 1
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]


def test_each_question_is_a_prompt_and_each_passage_read_once(ram: Bundle) -> None:
    batch = collator(ram)(EXAMPLES)
    assert [p.text for p in batch["passages"]] == list(EXAMPLES[0].passages)
    assert [row.passages for row in batch["rows"]] == [[0, 1], [1], [1]]
    assert [row.example.turns for row in batch["rows"]] == [(t,) for e in EXAMPLES for t in e.turns]
    assert [any(row.positives) for row in batch["rows"]] == [True, True, False]
    with pytest.raises(DataError, match="no tokens"):
        collator(ram)([Example(("text",), (Turn("", ("text",)),))])


def test_a_long_context_is_cut(ram: Bundle) -> None:
    builder = TrainingPromptBuilder(ram.tokenizer)
    long = Example(("Kormoor lies on the river Halen. " * 40, "Dun."), (Turn("Which river?", ("Halen",)),))
    batch = RamCollator(builder, [PLAIN], 64, seed=0, segment_tokens=4)([long])
    short = len(plain_ids(ram, "Dun."))
    assert [sum(p.token_counts) for p in batch["passages"]] == [64 - short, short]
    crowded = Example(tuple(f"{name} lies on the Halen." for name in ("Dun", "Pell", "Ost")), long.turns)
    batch = RamCollator(builder, [PLAIN], 2, seed=0, segment_tokens=4)([crowded])  # no room for the third
    assert sum(p.token_count for p in batch["passages"]) == 2
    with torch.no_grad():
        assert objective(ram)(**batch)["loss"].isfinite()


def test_impossible_settings_are_refused(tiny_bundle: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[1, 2\].*0 to 1"):
        make_reader(gated_layers=[2, 1])
    with pytest.raises(ConfigError, match="mean_pooling"):  # stage ram is for RAM
        RamLoss(tiny_bundle, TrainingPromptBuilder(tiny_bundle.tokenizer))
    with pytest.raises(ValueError, match="leave nothing to read"):
        RamConfig(close_reading=False, skimming="none")
    shape = {"name": "x", "method": RamConfig(), "window": 1000}
    assert BundleConfig(**shape, base_ratio=50, ratios=[2, 3, 32]).ratios == [2, 3, 32]
    with pytest.raises(ValueError, match="segment of 50 tokens"):
        BundleConfig(**shape, base_ratio=4, ratios=[2])
    with pytest.raises(ValueError, match="ratio of 2 or more"):
        BundleConfig(**shape, base_ratio=50, ratios=[1, 2])


def test_yes_and_no_make_no_positives(tiny_tokenizer: Any) -> None:
    """The word 'no' stands in many a text that does not answer with it."""
    text = "There is no doubt about it. Ada said yes."
    collate = RamCollator(
        TrainingPromptBuilder(tiny_tokenizer), ["{context} {question}"], 512, seed=0, segment_tokens=4
    )
    rows = collate([Example((text,), (Turn("Was it so?", ("No",)), Turn("Who said it?", ("Ada",))))])["rows"]
    assert not any(rows[0].positives)
    assert any(rows[1].positives)


def test_evidence_makes_positives(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Marked parts of a passage, to the letter, in place of the answer, which stands elsewhere, too, or nowhere."""
    passage = "Ada was there. Bo said that Ada won the cup. Ada left, and ada is no name."
    rows = [
        {"question": "Who won?", "answers": ["Ada"], "context": ["No part.", passage], "evidence": ["that Ada won"]},
        {"question": "Did she?", "answers": ["yes"], "context": ["No part.", passage], "evidence": ["won the cup."]},
        {"question": "Who won?", "answers": ["Ada"], "context": ["No part.", passage]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    examples = read_jsonl(file, max_turns=3)
    assert write_jsonl(tmp_path / "again.jsonl", examples) == 3
    assert read_jsonl(tmp_path / "again.jsonl", max_turns=3) == examples
    collate = RamCollator(
        TrainingPromptBuilder(tiny_tokenizer), ["{context} {question}"], 512, seed=0, segment_tokens=2
    )
    batch = collate(examples)
    bounds = [(p.text, a, b) for p in batch["passages"] for a, b in pairwise(p.bounds)]
    start = passage.index("that Ada won")
    said = [[(start, start + 12)], [(start + 9, start + 21)], [m.span() for m in re.finditer("Ada|ada", passage)]]
    for row, spans in zip(batch["rows"], said, strict=True):
        touched = [text == passage and any(a < end and b > begin for begin, end in spans) for text, a, b in bounds]
        assert row.positives == touched and 0 < sum(touched) < len(touched)
    for wrong, fault in (("that Ada won", "evidence: .*'that Ada won'"), ([" "], "' '"), (["ada won"], "'ada won'")):
        rows[0]["evidence"] = wrong
        file.write_text(json.dumps(rows[0]))
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{fault}"):
            read_jsonl(file)


@pytest.mark.parametrize("tied", [True, False])
def test_full_tuning_leaves_the_embeddings_and_a_head_tied_to_them(tiny_tokenizer: Any, tied: bool) -> None:
    made = ram_bundle(tiny_tokenizer, decoder={"mode": "full"}, tied=tied)
    own = made.reader.own
    trained = {id(p) for p in made.reader.trained_parameters()}
    frozen = {name for name, p in own.named_parameters() if id(p) not in trained}
    assert frozen == {"model.embed_tokens.weight"}
    assert (own.lm_head.weight is made.backbone.embeddings.weight) == tied
    assert (id(own.lm_head.weight) in trained) != tied
