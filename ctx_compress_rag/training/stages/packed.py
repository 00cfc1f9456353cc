"""Stage repeat_and_answer: a compressor and its reader trained on packed rows."""

from __future__ import annotations

import random
from dataclasses import replace

from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.text.templates import PromptBuilder
from ctx_compress_rag.training.compression_config import RepeatAndAnswerRecipe
from ctx_compress_rag.training.engine.loop import Job
from ctx_compress_rag.training.engine.speedups import make_fast
from ctx_compress_rag.training.examples import load_examples, load_texts
from ctx_compress_rag.training.objectives.packed import LONGEST, PackedSlotData, PackedSlotLoss, collate_packed
from ctx_compress_rag.training.stage import Stage, register
from ctx_compress_rag.training.stages.compression import bundle_job, start_bundle


def start(recipe: RepeatAndAnswerRecipe, resume: bool) -> Job:
    """Make the job that trains a bundle on the recipe's questions, their passages and its texts."""
    questions = recipe.data.model_copy(update={"texts": []})
    examples = load_examples(recipe.model_copy(update={"data": questions}))
    texts = _texts(recipe, examples)
    bundle = start_bundle(recipe, examples)
    loss = PackedSlotLoss(bundle)
    make_fast(bundle.backbone.model, recipe.optim, saved=bundle.config.decoder is None)
    builder = PromptBuilder(bundle.tokenizer, max(recipe.data.max_answer_tokens, LONGEST + 1))
    job = bundle_job(recipe, bundle, loss, PackedSlotData(builder, examples, texts, recipe), collate_packed)
    return replace(job, micro_batch_size=1)


def _texts(recipe: RepeatAndAnswerRecipe, examples: list[Example]) -> list[str]:
    """The passages to repeat: those of the questions and the rows of the texts, checked for held-out ones."""
    passages = list(dict.fromkeys(passage for example in examples for passage in example.passages))
    passages += [row.passages[0] for row in load_texts(recipe)]
    random.Random(recipe.seed).shuffle(passages)
    return passages


register(Stage(RepeatAndAnswerRecipe, start))
