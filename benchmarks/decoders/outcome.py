"""What a trial of a decoder says, and how it compares."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import CtxCompressError
from ctx_compress_rag.models.inputs import NO_TOKEN, DecoderInputs
from ctx_compress_rag.prompt import Prompt

YES = "yes"
STEPS = 4  # tokens of an answer


class Wrong(Exception):
    """A result that differs from the plain computation of it."""


def outcome(way: Callable[[], str | None]) -> str:
    try:
        return way() or YES
    except CtxCompressError as error:
        return f"refused: {error}"
    except Wrong as error:
        return f"wrong: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def check_close(found: Any, wanted: Any, what: str, most: float = 2e-2) -> None:
    found, wanted = (torch.as_tensor(each).float() for each in (found, wanted))
    difference = float((found - wanted).abs().max()) if found.shape == wanted.shape and found.numel() else float("nan")
    if not difference <= most * max(1.0, float(wanted.std(correction=0))):
        raise Wrong(f"{what} differ by {difference:.2g}")


@torch.no_grad()
def greedy(model: Any, inputs: Callable[[Tensor], dict[str, Tensor]]) -> list[float]:
    """Log-probabilities of the greedy answer, by whole passes over one prompt, without padding and cache."""
    values, answer = [], torch.zeros(0, dtype=torch.long)
    for _ in range(STEPS):
        best = model(**inputs(answer), use_cache=False).logits[0, -1].float().log_softmax(-1).max(-1)
        values.append(float(best.values))
        answer = torch.cat([answer, best.indices.view(1)])
    return values


def spliced(read: DecoderInputs, prompt: Prompt, answer: Tensor) -> dict[str, Tensor]:
    whole = prompt.then(answer.tolist())
    pieces = [torch.as_tensor(piece) for piece in whole.pieces]
    vectors = torch.cat([piece.float() if piece.ndim == 2 else read.embed(piece) for piece in pieces])
    ids = torch.from_numpy(whole.ids()).masked_fill(torch.from_numpy(whole.vector_mask()), NO_TOKEN)
    return read.of(vectors[None], ids[None])


def check_answers(decoder: Decoder, prompts: list[Any], wanted: list[list[float]]) -> None:
    """Several at once, one alone, and one as a stream."""
    sampling = Sampling(max_tokens=STEPS, logprobs=True, decoder_settings=False)
    together = decoder.generate(prompts, sampling)
    alone = decoder.generate(prompts[:1], sampling)
    *pieces, streamed = decoder.stream(prompts[0], sampling)
    for answer, values in zip([*together, *alone, streamed], [*wanted, wanted[0], wanted[0]], strict=True):
        found = [token.logprob for token in getattr(answer, "logprobs", None) or ()]
        if found:
            check_close(found, values[: len(found)], "an answer's log-probabilities")
    if "".join(map(str, pieces)) != alone[0].text:
        raise Wrong("a stream gives another answer")
