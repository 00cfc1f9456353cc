"""Prompts in batches, and the answers to one batch by transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from transformers import GenerationConfig, StoppingCriteriaList

from ctx_compress_rag.decoding.generation import Generation, Sampling, TextWatch, choosers, end_ids
from ctx_compress_rag.decoding.splice import Spliced
from ctx_compress_rag.prompt import Prompt

T = TypeVar("T")


def in_batches(prompts: Sequence[Prompt], size: int, run: Callable[[list[int]], Iterable[T]]) -> list[T]:
    """What `run` makes of each prompt, in their order.

    Args:
        prompts: the prompts.
        size: most of them in a batch.
        run: is given the numbers of a batch's prompts: all soft or none, and of like length, so that little is padding.
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
    cancelled: Callable[[], bool] | None = None,
) -> list[Generation]:
    """Answers to a batch; none where cancelled.

    Args:
        model: a transformers causal LM.
        batch: the prompts, spliced.
        prompts: the prompts.
        tokenizer: the model's.
        sampling: how tokens are chosen and when to end.
        window: positions that the model can read; None: any number.
        on_text: is given each new piece of the first prompt's answer.
        cancelled: asked at every token; True ends all.
    """
    limits = [sampling.room(prompt.length, window) for prompt in prompts]
    ends = end_ids(tokenizer, model.generation_config.eos_token_id, sampling.stop)
    watch = TextWatch(tokenizer, sampling.stop, ends, limits, on_text, cancelled)
    model.generate(
        # It counts positions itself, from the mask: before transformers 5.2 those it is given do not advance.
        inputs_embeds=batch.inputs_embeds,
        attention_mask=batch.attention_mask,
        generation_config=GenerationConfig(
            max_new_tokens=max(limits),
            do_sample=False,  # where it is to sample, the processors make the likeliest token a sample
            num_beams=1,
            eos_token_id=sorted(ends) or None,
            pad_token_id=tokenizer.pad_token_id,
        ),
        logits_processor=choosers(sampling, tokenizer, ends, prompts, limits),
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    rows = zip(prompts, watch.done, strict=True)
    return [Generation(row[0], prompt.length, prompt.slots, *row[1:]) for prompt, row in rows if row]
