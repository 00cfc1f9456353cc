"""Batches of prompts, and the answers to one batch with transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from transformers import GenerationConfig, StoppingCriteriaList

from ctx_compress_rag.decoding.answering import Answering
from ctx_compress_rag.decoding.generation import Generation, Sampling
from ctx_compress_rag.decoding.splice import Spliced
from ctx_compress_rag.prompt import Prompt

T = TypeVar("T")


def in_batches(prompts: Sequence[Prompt], size: int, run: Callable[[list[int]], Iterable[T]]) -> list[T]:
    """Call `run` on batches of prompts; returns its result for each prompt, in order.

    Args:
        prompts: the prompts.
        size: most prompts in a batch.
        run: called with the indices of a batch: all soft or none, and of similar length, so that little is padding.
    """
    done: dict[int, T] = {}
    for soft in (False, True):
        group = [i for i, prompt in enumerate(prompts) if prompt.soft is soft]
        group.sort(key=lambda i: prompts[i].length)
        for start in range(0, len(group), size):
            batch = group[start : start + size]
            done |= zip(batch, run(batch), strict=True)
    return [done[i] for i in range(len(prompts))]


def generate(
    model: Any,
    batch: Spliced,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    sampling: Sampling,
    window: int | None,
    on_text: Callable[[str], object] | None = None,
    canceled: Callable[[], bool] = lambda: False,
) -> list[Generation]:
    """Answer a batch; returns no answers if canceled.

    Args:
        model: a transformers causal LM.
        batch: the prompts, spliced.
        prompts: the prompts.
        tokenizer: the model's.
        sampling: how tokens are chosen and when to end.
        window: positions that the model can read; None means any number.
        on_text: called with each new piece of the first prompt's answer.
        canceled: called at every token; True ends all answers.
    """
    answering = Answering(model, tokenizer, sampling, prompts, window, on_text, canceled)
    # `generate` would fill what is not given below with the model's own settings, which are among the processors.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.generate(
            # It counts positions from the mask: before transformers 5.2, given position ids would not advance.
            inputs_embeds=batch.inputs_embeds,
            attention_mask=batch.attention_mask,
            generation_config=GenerationConfig(
                max_new_tokens=max(answering.limits),
                do_sample=False,  # for sampling, the processors make the likeliest token a sample
                num_beams=1,
                eos_token_id=sorted(answering.end_ids) or None,
                pad_token_id=tokenizer.pad_token_id,
            ),
            logits_processor=answering.processors,
            stopping_criteria=StoppingCriteriaList([answering]),
        )
    finally:
        model.generation_config = own
    return [answer for answer in answering.done if answer is not None]
