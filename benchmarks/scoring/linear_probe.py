"""What a linear map finds in slots: the tokens that a slot stands for, and with them an answer's first token.

A reader's projector is a small map, and a frozen decoder knows tokens by their embeddings. So the probability that the
probe gives to token v of slot s is softmax(E (W s) + b)_v, with the decoder's embeddings E; W and b are trained. It
bounds a linear reader, and only if more passages do not improve it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.methods.sentence_slots import SentenceSlotsConfig
from ctx_compress_rag.text.tokenizing import text_ids, text_tokens

_STEPS, _BATCH, _RATE = 400, 256, 3e-3


@dataclass(frozen=True)
class ProbeScore:
    """For each question, 1 or 0: is its answer's first token among the n likeliest, of a passage of n different tokens?

    Attributes:
        ratio: source tokens per slot.
        own: in the slots of the question's passage.
        other: in those of the next question with another passage, with the same n: what frequent words give.
    """

    ratio: int
    own: list[float]
    other: list[float]


class LinearProbe(nn.Module):
    """The map W and bias b for fixed `embeddings`, (tokens, dim), of slots that are `slot_dim` wide."""

    def __init__(self, embeddings: Tensor, slot_dim: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.map = nn.Linear(slot_dim, embeddings.shape[1])
        self.bias = nn.Parameter(torch.zeros(len(embeddings)))

    def forward(self, slots: Tensor) -> Tensor:
        """Log-probabilities of tokens: (slots, slot_dim) -> (slots, tokens)."""
        return F.log_softmax(self.map(slots) @ self.embeddings.T + self.bias, dim=-1)


def fit_probe(slots: Tensor, tokens: Sequence[Tensor], embeddings: Tensor, steps: int = _STEPS) -> LinearProbe:
    """Train a probe on the mean log-likelihood of each slot's tokens.

    Args:
        slots: (slots, dim).
        tokens: for each slot, its tokens, as rows of `embeddings`.
        embeddings: (tokens, decoder dim).
        steps: of 256 slots, drawn at random.
    """
    torch.manual_seed(0)
    # Slots and embeddings of unit size: one learning rate serves all methods.
    probe = LinearProbe(embeddings / embeddings.norm(dim=1).mean(), slots.shape[1])
    seen = torch.bincount(torch.cat(list(tokens)), minlength=len(embeddings)) + 1.0
    with torch.no_grad():
        probe.bias.copy_(seen.log())
    optimizer = torch.optim.AdamW(probe.parameters(), lr=_RATE, weight_decay=0.0)
    for _ in range(steps):
        rows = torch.randint(len(slots), (_BATCH,)).tolist()
        owners = torch.cat([torch.full_like(tokens[row], place) for place, row in enumerate(rows)])
        loss = -probe(slots[rows])[owners, torch.cat([tokens[row] for row in rows])].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return probe


def minilm_bundle(bundle: Bundle) -> Bundle:
    """An untrained bundle of MiniLM's vectors, one for each `ratio` tokens at most, for the same decoder."""
    method = SentenceSlotsConfig(encoder="minilm", unit="tokens")
    return Bundle.build(bundle.config.model_copy(update={"method": method, "reader_share": 1}), bundle.backbone)


def probe_slots(
    bundle: Bundle, training: Sequence[str], questions: Sequence[Question], ratios: Sequence[int], steps: int = _STEPS
) -> list[ProbeScore]:
    """Fit a probe on passages' slots at each ratio, by `fit_probe`; score it on questions of one passage each.

    Raises:
        DataError: fewer than two questions have an answer that is a part of their passage.
    """
    asked = [(q, token) for q in questions if (token := _first_token(bundle, q)) is not None]
    if len({q.passages for q, _ in asked}) < 2:
        raise DataError("give questions of two or more passages that contain the answers word for word")
    passages = list(dict.fromkeys(q.passages[0] for q, _ in asked))
    ids = {text: torch.tensor(text_ids(bundle.tokenizer, text)) for text in (*training, *passages)}
    used = torch.cat(list(ids.values())).unique()  # all others are left out, to save time
    embeddings = bundle.backbone.embeddings.weight.detach().float().cpu()[used]
    scores = []
    for ratio in ratios:
        parts = [_slots(bundle, text, ratio) for text in training]
        tokens = [t for text, (_, counts) in zip(training, parts, strict=True) for t in ids[text].split(counts)]
        slots = torch.cat([slots for slots, _ in parts])
        center, size = slots.mean(0), slots.sub(slots.mean(0)).norm(dim=1).mean()
        probe = fit_probe((slots - center) / size, [torch.searchsorted(used, t) for t in tokens], embeddings, steps)
        with torch.inference_mode():
            found = {text: probe((_slots(bundle, text, ratio)[0] - center) / size).amax(0) for text in passages}
        likeliest = {
            text: [
                set(used[found[each].topk(len(ids[text].unique())).indices].tolist())
                for each in (text, passages[(place + 1) % len(passages)])
            ]
            for place, text in enumerate(passages)
        }
        own, other = ([float(token in likeliest[q.passages[0]][which]) for q, token in asked] for which in (0, 1))
        scores.append(ProbeScore(ratio, own, other))
    return scores


def _slots(bundle: Bundle, text: str, ratio: int) -> tuple[Tensor, list[int]]:
    [soft] = bundle.compress([text], ratio)
    return torch.from_numpy(soft.slots).float(), soft.token_counts.tolist()


def _first_token(bundle: Bundle, q: Question) -> int | None:
    """The passage's token with which an answer begins; None if no answer is in the passage."""
    text = q.passages[0]
    start = next((text.find(answer) for answer in q.answers if answer and answer in text), None)
    if start is None:
        return None
    tokens = text_tokens(bundle.tokenizer, text)
    return next((i for i, (_, end) in zip(tokens.ids, tokens.offsets, strict=True) if end > start), None)


def probe_table(scores: Sequence[ProbeScore]) -> str:
    """The scores as a Markdown table, ± one standard error."""
    return report.markdown_table(
        [
            {
                "ratio": report.ratio_text(s.ratio),
                "found in its passage": report.mean_text(s.own),
                "in another passage": report.mean_text(s.other),
                "difference": report.mean_text(np.subtract(s.own, s.other).tolist()),
                "questions": str(len(s.own)),
            }
            for s in scores
        ]
    )
