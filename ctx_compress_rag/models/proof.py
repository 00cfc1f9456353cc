"""A decoder proves with a few tokens, when it is loaded, that it is right in each way in which this library runs it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag import __version__
from ctx_compress_rag.models.generation import continue_prompt
from ctx_compress_rag.models.inputs import NO_TOKEN, DecoderInputs
from ctx_compress_rag.models.passed import unless_passed
from ctx_compress_rag.models.transformers_internals import cache_argument, can_share_cache

_LONG, _SHORT, _MORE = 7, 4, 2  # tokens of two prompts, and what the first is continued with
_EXACT = 1e-3  # in standard deviations of the logits; less is no fault
# Each way draws the roundings of all layers anew, as does a change in the embeddings by one rounding: it moves logits
# as far. In bfloat16, right decoders of 2 to 32 layers moved at most 1.6 times as far, and the least fault 5 times.
_ROUNDINGS = 4


def prove_once(model: Any) -> None:
    """Call `prove_decoder`, unless a decoder of such a config, class, dtype, kind of device and version has passed."""
    import transformers

    kind = [type(model).__qualname__, model.config.to_json_string(use_diff=False), str(model.dtype), model.device.type]
    key = hashlib.sha256(json.dumps([*kind, transformers.__version__, torch.__version__, __version__]).encode())
    unless_passed("proved", key.hexdigest(), partial(prove_decoder, model))


@torch.no_grad()
def prove_decoder(model: Any) -> None:
    """Raise ValueError, with the reason, if a causal LM is wrong in a way in which this library runs it."""
    _Proof(model).run()


class _Proof:
    """Compares each way with one pass over the token ids of a prompt, of which the others read parts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inputs = DecoderInputs(model)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        places = torch.arange(1, _LONG + _MORE + 1, device=self._inputs.device)
        self._ids = places * max(1, vocabulary // 16) % vocabulary
        with self._named("reads token ids"):
            self._expected = model(input_ids=self._ids.unsqueeze(0), use_cache=False).logits[0].float()
        self._rounding = 0.0

    def run(self) -> None:
        if not self._expected.isfinite().all():
            raise ValueError(f"it computes NaN or infinity in {self._model.dtype}: give another dtype, such as float32")
        with self._named("reads vectors in place of token ids"):
            inputs, mask, places = self._rows()
            cache = self._cache()
            inputs |= {"attention_mask": mask, "position_ids": places}
            read = self._model(**inputs, **cache, use_cache=bool(cache)).logits
            self._rounding = self._distance(read[2], 0, of=read[0].float())
            self._check(read[0], 0)
        with self._named(f"reads a prompt that is padded on the {self._inputs.padding_side}"):
            self._check(read[1][mask[1].bool()], 0)
        with self._named("goes on from its cache"):
            if cache:
                mask, places = F.pad(mask, (0, 1), value=1), places[:, -1:] + 1
                ids = self._ids[places]
                step = self._model(input_ids=ids, attention_mask=mask, position_ids=places, **cache, use_cache=True)
                self._check(step.logits[0], _LONG)
                self._check(step.logits[1], _SHORT)
            else:
                self._check(self._generated(), _LONG - 1)

    def _rows(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return vectors, mask and positions of the long prompt, the short one, and the long one rounded otherwise."""
        mask = torch.ones(3, _LONG, dtype=torch.long, device=self._inputs.device)
        padding = slice(_LONG - _SHORT) if self._inputs.padding_side == "left" else slice(_SHORT, None)
        mask[1, padding] = 0
        places = (mask.cumsum(1) - 1).clamp(min=0) * mask
        ids = self._ids[places].masked_fill(mask == 0, self._inputs.padding)
        vectors = self._inputs.embed(ids)
        vectors[2, :, ::2] *= 1 + torch.finfo(vectors.dtype).eps
        return self._inputs.of(vectors, ids.masked_fill(mask == 0, NO_TOKEN)), mask, places

    def _cache(self) -> dict[str, Any]:
        from transformers import DynamicCache

        return {cache_argument(self._model): DynamicCache()} if can_share_cache(self._model) else {}

    def _generated(self) -> Tensor:
        scores: list[Tensor] = []

        def choose(found: Tensor) -> int | None:
            scores.append(found)
            return int(self._ids[_LONG - 1 + len(scores)]) if len(scores) <= _MORE else None

        long = self._ids[:_LONG].unsqueeze(0)
        continue_prompt(self._model, self._inputs.of(self._inputs.embed(long), long), choose, _MORE + 2)
        return torch.stack(scores)

    def _check(self, logits: Tensor, first: int) -> None:
        """Raise ValueError if logits (positions, vocabulary) are not those of the positions from `first` on."""
        distance = self._distance(logits, first, of=self._expected)
        if not distance <= max(_EXACT, _ROUNDINGS * self._rounding):
            raise ValueError(f"logits off by {distance:.2g} standard deviations, by rounding {self._rounding:.1g}")

    @staticmethod
    def _distance(logits: Tensor, first: int, of: Tensor) -> float:
        """Return the median over positions, as a near tie of two experts may send one token to the other."""
        of = of[first : first + len(logits)]
        return float(((logits.float() - of).pow(2).mean(-1).sqrt() / of.std(-1)).median())

    @contextmanager
    def _named(self, way: str) -> Iterator[None]:
        import transformers

        try:
            yield
        except Exception as error:
            raise ValueError(
                f"{type(self._model).__name__} of transformers {transformers.__version__} is wrong in "
                f"{self._model.dtype} when it {way} ({type(error).__name__}: {error}): choose another decoder, dtype, "
                "or version of transformers"
            ) from error
