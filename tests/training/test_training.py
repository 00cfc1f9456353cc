"""Training: the losses against the papers' equations, what is trained, time limits and reports."""

import copy
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.world.world import world_examples
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.files import TEACHER
from ctx_compress_rag.cli import main
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.loading import progress_line
from ctx_compress_rag.text.templates import TEMPLATES, question_messages
from ctx_compress_rag.training.engine.loop import count_batch_tokens, speed_report
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, passage_token_shares
from ctx_compress_rag.training.run import SHIPPED, parse_recipe, run_recipe
from ctx_compress_rag.training.stages.answer import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.stages.distillation import (
    DistillationCollator,
    DistillationLoss,
    DistillationRecipe,
)
from ctx_compress_rag.training.stages.teacher import AnswerLoss, TextCollator
from helpers import architectures
from helpers.models import draw_lora, widen
from helpers.ram import EXAMPLES, after_hole, plain_ids
from helpers.training import STAGES, losses, report, settings_of, write_recipe

NO_SLOTS = torch.zeros(1, 1, dtype=torch.bool)


def test_distillation_loss_is_the_papers_sum(make_tiny_bundle: Any) -> None:
    """Eq. 5 and 6 one example, token and ratio at a time, in float64."""
    bundle = make_tiny_bundle(seed=3)
    draw_lora(bundle.backbone.model, adapter="reader")
    objective = DistillationLoss(bundle)
    objective.ratios = [4, 8]
    collate = DistillationCollator(TrainingPromptBuilder(bundle.tokenizer), ["{context}\n\n{question}"], 512, seed=0)
    batch = collate(EXAMPLES)
    assert len(batch["passages"]) == 2 and batch["prompts"].passages == [[0, 1], [1]]  # a shared one is encoded once
    loss = float(objective(**batch)["loss"])

    embed, total = bundle.backbone.embeddings, 0.0
    for example in EXAMPLES:
        # Text and slots in turn: the prompt up to each answer, then the answer token by token.
        history_text = torch.empty(0, 32)
        history_slots = {r: torch.empty(0, 32) for r in objective.ratios}
        for number, turn in enumerate(example.turns):
            context = "\n\n".join(example.passages) + "\n\n" if number == 0 else ""
            prompt = plain_ids(bundle, f"<|user|>{context}{turn.question}<|assistant|>")
            history_text = torch.cat([history_text, embed(torch.tensor(prompt))])
            for r in objective.ratios:
                if number == 0:
                    user = bundle.tokenizer.convert_tokens_to_ids("<|user|>")
                    parts = [embed(torch.tensor([user]))]
                    for i, passage in enumerate(example.passages):
                        if i:
                            parts.append(embed(torch.tensor(after_hole(bundle, "\n\n"))))
                        parts.append(bundle.embed(bundle.compress([passage], ratio=r)[0]))
                    parts.append(embed(torch.tensor(after_hole(bundle, f"\n\n{turn.question}<|assistant|>"))))
                    history_slots[r] = torch.cat(parts)
                else:
                    history_slots[r] = torch.cat([history_slots[r], embed(torch.tensor(prompt))])
            for token in plain_ids(bundle, turn.answers[0] + "<|end|>"):
                with torch.no_grad(), bundle.text_decoder() as teacher:
                    q = teacher(inputs_embeds=history_text[None]).logits[0, -1].double().softmax(-1)
                for r in objective.ratios:
                    with torch.no_grad(), bundle.soft_decoder(NO_SLOTS) as student:
                        p = student(inputs_embeds=history_slots[r][None]).logits[0, -1].double().softmax(-1)
                    total += float((q * (q.log() - p.log())).sum())
                    history_slots[r] = torch.cat([history_slots[r], embed(torch.tensor([token]))])
                history_text = torch.cat([history_text, embed(torch.tensor([token]))])
    assert loss == pytest.approx(total / len(EXAMPLES), rel=1e-4)
    assert total > 0.1  # the adapters differ, so there is something to sum


def test_a_share_of_the_examples_is_repeated(make_tiny_bundle: Any) -> None:
    """All passages of an example, or none; drawn alike in every batch."""
    builder = TrainingPromptBuilder(make_tiny_bundle().tokenizer)
    collate = DistillationCollator(builder, ["{context} {question}"], 512, seed=3, repeat_share=0.3)
    examples = [Example((f"{n} north", f"{n} south"), (Turn("?", ("yes",)),)) for n in range(200)]

    def repeated(examples: list[Example]) -> list[str]:
        batch = collate(examples)
        return [batch["passages"][place].text for [place] in batch["repeats"].passages]

    found = repeated(examples)
    assert 80 < len(found) < 160 and found == [text for e in examples if e.passages[0] in found for text in e.passages]
    assert found == [text for start in range(0, 200, 8) for text in repeated(examples[start : start + 8])]


@pytest.mark.parametrize("stage", ["distillation", "answer"])
def test_each_example_draws_its_own_ratio(make_tiny_bundle: Any, stage: str) -> None:
    """One of three for each: the sum of the single examples' losses at what was drawn, and all are drawn in turn."""
    bundle = make_tiny_bundle(seed=3)
    widen(bundle.backbone.model, seed=4)  # text and slots are read differently: not a loss of rounding errors
    builder, plain = TrainingPromptBuilder(bundle.tokenizer), ["{context}\n\n{question}"]
    objective: Any = DistillationLoss(bundle) if stage == "distillation" else LikelihoodLoss(bundle)
    collate: Any = (
        DistillationCollator(builder, plain, 512, seed=0)
        if stage == "distillation"
        else AnswerCollator(builder, plain, 512, seed=0)
    )
    ratios = [4, 8, 16]
    examples = [Example(e.passages, e.turns[:1]) for e in EXAMPLES]
    items = objective.items(**collate(examples))

    def loss(examples: list[Example], ratios: list[int], sample: int | None, step: int = 0) -> float:
        objective.ratios, objective.sample, objective.step = ratios, sample, step
        with torch.no_grad():
            return float(objective(**collate(examples), num_items_in_batch=items)["loss"])

    alone = [[loss([example], [ratio], None) for ratio in ratios] for example in examples]
    possible = [a + b for a in alone[0] for b in alone[1]]
    found = [loss(examples, ratios, 1, step) for step in range(20)]
    nearest = {min(range(9), key=lambda i: abs(possible[i] - each)) for each in found}
    assert all(min(abs(p - each) for p in possible) < 1e-4 for each in found)
    assert len(nearest) > 5
    shared = [sum(loss([example], ratios, 1, step) for example in examples) for step in range(10)]
    assert shared == pytest.approx(found[:10], rel=1e-3), "micro-batches and processes draw as the whole batch does"
    assert loss(examples, ratios, None) == pytest.approx(sum(map(sum, alone)), rel=1e-4)


def test_self_distillation_is_added_to_the_likelihood(make_tiny_bundle: Any) -> None:
    """The likelihood plus a thousand KL(text || slots), means over tokens: two losses that each have one of them."""
    bundle = make_tiny_bundle(seed=3)
    builder, plain = TrainingPromptBuilder(bundle.tokenizer), ["{context}\n\n{question}"]
    both = LikelihoodLoss(bundle, self_distillation=1000.0)
    batch = AnswerCollator(builder, plain, 512, seed=0, with_text=True)(EXAMPLES)
    both.ratios = [4, 8]
    likelihood, distillation = LikelihoodLoss(bundle), DistillationLoss(bundle)
    likelihood.ratios = distillation.ratios = [4, 8]
    with torch.no_grad():
        found = both(**batch)["loss"]
        tokens = both.items(**batch)
        answers = likelihood(**AnswerCollator(builder, plain, 512, seed=0)(EXAMPLES))["loss"]
        apart = distillation(**DistillationCollator(builder, plain, 512, seed=0)(EXAMPLES))["loss"]
    divergence = apart * len(EXAMPLES) / tokens
    assert float(found) == pytest.approx(float(answers + 1000 * divergence), rel=1e-4)
    assert float(1000 * divergence) > 0.1


def test_answer_loss_is_the_answers_cross_entropy(tiny_bundle: Any) -> None:
    batch = TextCollator(TrainingPromptBuilder(tiny_bundle.tokenizer), TEMPLATES[:1], 512, seed=0)(EXAMPLES)
    backbone = Backbone(tiny_bundle.backbone.copy_model(), tiny_bundle.tokenizer)
    backbone.add_adapter(TEACHER, lambda: lora_config(TuneConfig(mode="lora")))  # untrained: it changes nothing
    losses = []
    with torch.no_grad():
        loss = float(AnswerLoss(backbone)(**batch)["loss"])
        for ids, answers, mask in zip(batch["input_ids"], batch["answers"], batch["attention_mask"], strict=True):
            length = int(mask.sum())
            log_p = tiny_bundle.backbone.model(input_ids=ids[None, :length]).logits[0].double().log_softmax(-1)
            losses += [-float(log_p[i - 1, ids[i]]) for i in range(1, length) if answers[i]]
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
@pytest.mark.parametrize("answer", ["goat", "a goat of the town"])
def test_base_models_get_the_space_before_an_answer(name: str, answer: str) -> None:
    """Prompt and answer are the tokens of one text, for byte-level and Metaspace tokenizers."""
    tokenizer = copy.deepcopy(architectures.tokenizer(name))
    tokenizer.chat_template = None
    example = Example(EXAMPLES[0].passages, (Turn("Which pet?", (answer,)),))
    prompt = TrainingPromptBuilder(tokenizer).text_prompt(example, TEMPLATES[0])
    text = "\n\n".join(example.passages) + f"\n\nQuestion: Which pet?\nAnswer: {answer}"
    whole = tokenizer((tokenizer.bos_token or "") + text, add_special_tokens=False)["input_ids"]
    assert prompt.ids().tolist() == [*whole, tokenizer.eos_token_id]
    assert tokenizer.decode(prompt.ids()[prompt.answers]).strip().startswith(answer)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mean_pooling/teacher", {"stepz": 3}, "stepz"),
        ("mean_pooling/teacher", {"optim": {"batch_size": 6, "micro_batch_size": 4}}, "micro_batch_size"),
        ("mean_pooling/teacher", {"optim": {"learning_rate": 1e-5}}, "final_learning_rate 2e-05 must be below"),
        (
            "mean_pooling/teacher",
            {"optim": {"learning_rate": 1e-5, "final_learning_rate": 1e-5, "schedule": "linear"}},
            "final_learning_rate",
        ),
        ("mean_pooling/teacher", {"tune": {"mode": "full"}}, "tune.mode is full"),
        ("mean_pooling/teacher", {"output": ""}, "output: .*it is empty: give a folder"),
        ("mean_pooling/teacher", {"data": {"files": []}}, "give files or texts"),
        ("mean_pooling/teacher", {"data": {"files": ["x.jsonl"], "templates": ["no places"]}}, "no places"),
        ("mean_pooling/teacher", {"stage": "alchemy"}, "^[^:]*: stage: 'alchemy' is unknown: give one of .*'teacher'"),
        ("mean_pooling/compressor", {"ratios": []}, "ratios: List should have at least 1 item"),
        # A teacher may train for days before the compressor's recipe begins: ratios are checked before.
        ("mean_pooling/compressor", {"ratios": [4, 6]}, "ratio 6 cannot be made from slots stored at 4"),
        (
            "mean_pooling/compressor",
            {"curriculum": [{"step": 0, "ratios": [6]}]},
            "ratio 6 does not divide the encoder's window of 1024",
        ),
        ("mean_pooling/compressor", {"window": 1022}, "ratio 4 does not divide the encoder's window of 1022"),
    ],
)
def test_impossible_recipes_are_refused_by_name(name: str, change: dict[str, Any], named: str) -> None:
    recipe = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text()) | change
    with pytest.raises(ConfigError, match=named):
        parse_recipe(recipe, "test")


@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_value_of_any_key_is_named(stage: str, decoder: Path, tmp_path: Path) -> None:
    """Whatever YAML can hold, in the place of any key, is taken or refused by its name."""
    settings = settings_of(decoder, stage, tmp_path)
    for key in type(parse_recipe(settings, "this")).model_fields:
        for value in (-7, [[None]], {"a": 1}):
            try:
                parse_recipe(settings | {key: value}, "this")
            except ConfigError as error:
                assert key in str(error)


def test_yaml_that_unfolds_to_gigabytes_is_refused_at_once() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghij")]
    began = time.monotonic()
    with pytest.raises(ConfigError, match="seed"):
        parse_recipe({"stage": "teacher", "seed": yaml.safe_load("\n".join(lines))["j"]}, "test")
    assert time.monotonic() - began < 5


def test_a_lora_teacher_reads_full_text_in_the_bundle(decoder: Path, tmp_path: Path) -> None:
    """The bundle's text decoder is the decoder with the teacher's adapter; it asks as it was trained."""
    optim = {"steps": 2, "learning_rate": 0.5}  # two steps that show
    lora = run_recipe(write_recipe(decoder, "adapter", tmp_path / "lora", optim))
    data = {"files": [str(decoder / "data.jsonl")], "max_answer_tokens": 7}
    data["templates"] = ["Refer to {context}. {question}", TEMPLATES[0]]
    student = write_recipe(decoder, "distillation", tmp_path / "student", {"steps": 2}, teacher=str(lora), data=data)
    bundle = Bundle.from_pretrained(run_recipe(student) / "bundle")
    assert (bundle.config.template, bundle.config.answer_tokens) == (data["templates"][0], 7)
    ids = torch.arange(5, 15).unsqueeze(0)
    plain = AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32)
    with torch.no_grad():
        untuned = plain(ids).logits
        tuned = PeftModel.from_pretrained(plain, lora)(ids).logits
        with bundle.text_decoder() as model:
            logits = model(ids).logits
    torch.testing.assert_close(logits, tuned, atol=1e-3, rtol=1e-3)  # the bundle is in half precision
    assert (logits - untuned).abs().max() > 1e-2
    with pytest.raises(BundleError, match="adapter_config"):
        Bundle.build(bundle.config, bundle.backbone, teacher=tmp_path)


def test_a_long_passage_is_cut_and_its_answer_kept(tiny_bundle: Any) -> None:
    builder = TrainingPromptBuilder(tiny_bundle.tokenizer)
    long = Example(("Kormoor lies on the river Halen. " * 40,), (Turn("Which river?", ("Halen",)),))
    batch = TextCollator(builder, TEMPLATES[:1], 64, seed=0)([long])
    assert tiny_bundle.tokenizer.decode(batch["input_ids"][0][batch["answers"][0]]).strip() == "Halen<|end|>"
    assert batch["input_ids"].shape[1] < 64 + 60
    same = DistillationCollator(builder, TEMPLATES[:1], 64, seed=0)([long])
    assert same["text_prompts"][0].ids().tolist() == batch["input_ids"][0].tolist()
    assert [len(passage.ids) for passage in same["passages"]] == [64]


@pytest.mark.parametrize("every", [2, 9])
def test_the_report_includes_the_steps_since_the_last_log(decoder: Path, tmp_path: Path, every: int) -> None:
    each, rarely = (
        report(run_recipe(write_recipe(decoder, "adapter", tmp_path / name, {"steps": 3, "log_every": log_every})))
        for name, log_every in (("each", 1), ("rarely", every))
    )
    curve = losses(tmp_path / "each")
    assert losses(tmp_path / "rarely")[-1] == pytest.approx(curve[2] if every == 2 else sum(curve) / 3, rel=1e-5)
    assert rarely["tokens"] == each["tokens"] > 0
    assert rarely["final_loss"] == losses(tmp_path / "rarely")[-1]


def test_progress_bar_is_shown_although_transformers_is_quiet(
    decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_line("all of it"):
        run_recipe(write_recipe(decoder, "adapter", tmp_path / "out", {"steps": 2}))
    assert "2/2 [" in capsys.readouterr().err


@pytest.mark.parametrize("other", [False, True])
def test_teacher_of_another_decoder_gives_a_warning(
    decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, other: bool
) -> None:
    """It may fit in shape, and answers wrong."""
    teacher = run_recipe(write_recipe(decoder, "adapter", tmp_path / "teacher", {"steps": 1}))
    own = shutil.copytree(decoder, tmp_path / "other") if other else decoder
    start = {"decoder": str(own), "teacher": str(teacher)}
    run_recipe(write_recipe(decoder, "distillation", tmp_path / "out", {"steps": 1}, **start))
    assert (f"was trained on the decoder '{decoder}', not '{own}'" in caplog.text) is other


def test_what_a_recipe_leaves_out_is_the_bundles(decoder: Path, tmp_path: Path) -> None:
    """Its name, ratios, window and prompt, which the bundle that is trained further keeps."""
    own = {"templates": ["{question} Use: {context}"], "max_answer_tokens": 7, "files": [str(decoder / "data.jsonl")]}
    first = {"base_ratio": 2, "ratios": [2, 6], "window": 60, "reads": "a test", "name": "first", "data": own}
    run_recipe(write_recipe(decoder, "distillation", tmp_path / "first", {"steps": 1}, **first))
    bundle = tmp_path / "first" / "bundle"
    data = {"files": own["files"]}
    further = {"stage": "distillation", "output": str(tmp_path / "further"), "bundle": str(bundle), "data": data}
    (tmp_path / "further.yaml").write_text(yaml.safe_dump(further | {"optim": {"steps": 1, "batch_size": 2}}))
    run_recipe(tmp_path / "further.yaml")
    before, after = (Bundle.from_pretrained(path, device="cpu") for path in (bundle, tmp_path / "further" / "bundle"))
    assert after.config == before.config.model_copy(update={"decoder_digest": after.config.decoder_digest})
    assert (after.config.template, after.config.answer_tokens, after.config.window) == (own["templates"][0], 7, 60)
    usual = parse_recipe(further | {"bundle": "smollm2-135m"}, "test")
    assert isinstance(usual, DistillationRecipe) and usual.data.templates == list(TEMPLATES)
    with pytest.raises(ConfigError, match="name"):
        parse_recipe(settings_of(decoder, "distillation", tmp_path, name=None), "test")


def test_a_window_beyond_the_decoders_positions_is_refused(decoder: Path, tmp_path: Path) -> None:
    """Some decoders would train at positions that they never learned, others raise an IndexError."""
    with pytest.raises(ConfigError, match="2048.*1024"):
        run_recipe(write_recipe(decoder, "answer", tmp_path / "out", window=2048))


def test_a_time_limit_saves_a_bundle_and_the_same_command_goes_on(
    decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = {"steps": 4, "batch_size": 2, "save_every": 2}
    whole, cut = (str(write_recipe(decoder, "answer", tmp_path / name, optim)) for name in ("whole", "cut"))
    assert main(["train", whole]) == 0
    capsys.readouterr()
    assert main(["train", cut, "--minutes", "0", "--no-resume"]) == 0
    assert capsys.readouterr().out.strip().endswith("without --no-resume")
    assert main(["train", cut, "--minutes", "0.001"]) == 0  # the decoder alone takes longer to load
    stopped = re.search("stopped at step ([123]) of 4", capsys.readouterr().out)
    assert stopped and report(tmp_path / "cut" / "bundle")["steps"] == int(stopped[1])
    Bundle.from_pretrained(tmp_path / "cut" / "bundle")
    assert not (tmp_path / "cut" / "training_report.json").exists()
    assert main(["train", cut]) == 0
    assert report(tmp_path / "cut")["resumed"] is True
    assert report(tmp_path / "cut")["tokens"] == report(tmp_path / "whole")["tokens"]
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_speed_is_the_typical_one_and_padding_does_not_count() -> None:
    batch = {"input_ids": torch.ones(2, 8), "attention_mask": torch.tensor([[1] * 8, [1] * 4 + [0] * 4])}
    assert count_batch_tokens(batch) == 12
    history = [{"tokens": n * 1000, "seconds": s} for n, s in ((0, 0.0), (1, 9.0), (2, 10.0), (3, 11.0), (4, 12.0))]
    assert speed_report(history)["tokens_per_second"] == 1000  # the slow first interval compiles


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_full_copy_of_a_bfloat16_decoder_is_trained_in_float32(make_tiny_bundle: Any, side: str) -> None:
    """1e-5 of a weight of 1 is lost in bfloat16; what the copy shares is as it was."""
    plain = make_tiny_bundle(encoder={"mode": "full"}, decoder={"mode": "full"})
    other = "decoder" if side == "encoder" else "encoder"
    method = plain.config.method.model_copy(update={other: TuneConfig(mode="frozen")})
    config = plain.config.model_copy(update={"method": method})
    bundle = Bundle.build(config, Backbone(plain.backbone.model.to(torch.bfloat16), plain.tokenizer))
    objective = DistillationLoss(bundle)
    trained = [p for p in objective.parameters() if p.requires_grad]
    assert trained and {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in bundle.backbone.model.parameters()} == {torch.bfloat16}
    batch = DistillationCollator(TrainingPromptBuilder(bundle.tokenizer), ["{context} {question}"], 64, 0)(
        world_examples("train", 2, 2, max_turns=1, passages=(1,))
    )
    with torch.autocast("cpu", torch.bfloat16):
        objective(**batch)["loss"].backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in trained)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(0, 200))
def test_passages_share_what_others_leave(lengths: list[int], total: int) -> None:
    kept = passage_token_shares(lengths, total)
    assert all(0 <= k <= n for k, n in zip(kept, lengths, strict=True))
    assert sum(kept) == min(total, sum(lengths))  # nothing that is needed is wasted
    cut = [k for k, n in zip(kept, lengths, strict=True) if k < n]
    assert not cut or (max(cut) - min(cut) <= 1 and min(cut) >= max(kept) - 1)


def test_a_question_that_names_a_place_is_left_as_it_is() -> None:
    [message] = question_messages("{context}\n{question}", "a {question} b", "What is {context}?")
    assert message["content"] == "a {question} b\nWhat is {context}?"
