"""Continue one prompt with transformers' own `generate`, which runs any decoder."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continue_prompt(
    model: Any, inputs: Mapping[str, Tensor], choose: Callable[[Tensor], int | None], limit: int
) -> None:
    """Give `choose` the scores (vocabulary,) of each next token, at most `limit` times, until it returns None.

    `inputs` are arguments of `forward` for one prompt, as `DecoderInputs.of` returns them.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    token: int | None = 0

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal token
        token = choose(scores[0])
        return torch.full_like(scores, -torch.inf).index_fill(1, scores.new_tensor([token or 0]).long(), 0.0)

    def ended(input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.tensor([token is None], device=input_ids.device)

    beside = {name: value for name, value in inputs.items() if name != "inputs_embeds"}

    # Bamba, Falcon-H1, Nemotron-H, Zamba pass `inputs_embeds` on, too, but transformers looks for it in the signature.
    def prepare(input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        made = model.prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if made.get("inputs_embeds") is not None:
            made |= beside
        return made

    # `generate` would take what is not given here from the model's own settings, which the answer applies itself.
    without = copy.copy(model)
    without.generation_config = GenerationConfig()
    without.prepare_inputs_for_generation = prepare
    without.generate(
        inputs_embeds=inputs["inputs_embeds"],
        generation_config=GenerationConfig(max_new_tokens=limit, do_sample=False, num_beams=1),
        logits_processor=LogitsProcessorList([process]),
        stopping_criteria=StoppingCriteriaList([ended]),
    )
