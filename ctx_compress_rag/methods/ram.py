"""RAM (Read As Human): choose the segments that a question needs as text, and make a vector of each other segment.

Passages are cut into equal segments (section 3).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError, RatioError
from ctx_compress_rag.methods.base.compressor import (
    PassageSlots,
    SlotBatch,
    TokenCompressor,
    TrunkCompressor,
    pad_token_ids,
)
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig
from ctx_compress_rag.methods.base.reader import LinearMap, Reader
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.text.tokenizing import check_text_length, text_ids, text_tokens

# Thai to Burmese and Khmer, kana, Han and its extensions.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_SPACED_LETTER = rf"[^\W{_UNSPACED}]"


@dataclass(frozen=True)
class SegmentRun:
    """Neighboring segments, from `start` to `end` (exclusive), that are all `kept` as text or all skimmed."""

    kept: bool
    start: int
    end: int


@dataclass(frozen=True)
class RamSegments:
    """A passage cut into segments of equal length in tokens, except perhaps the last; no segment spans two passages."""

    text: str
    ids: list[list[int]]  # of each segment
    bounds: list[int]  # where the text of each segment begins in `text`, and where the last one ends

    @classmethod
    def of(cls, tokenizer: Any, text: str, size: int) -> Self:
        """Cut a passage into segments of `size` tokens.

        The cuts are counted from the first token of the passage, so that they are the same as when it was stored. The
        decoder's tokenizer must be a fast one, because offsets are needed.
        """
        tokens = text_tokens(tokenizer, text)
        ids = tokens.ids
        # A segment's text begins where the token before it ends: a space goes with the word that follows.
        ends = [end for _, end in tokens.offsets]
        starts = range(0, len(ids), size)
        bounds = [0 if start == 0 else ends[start - 1] for start in starts]
        return cls(text, [ids[start : start + size] for start in starts], [*bounds, len(text)])

    @property
    def token_count(self) -> int:
        return sum(self.token_counts)

    @property
    def token_counts(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    def span(self, run: SegmentRun) -> tuple[int, int]:
        return self.bounds[run.start], self.bounds[run.end]

    def text_of(self, run: SegmentRun) -> str:
        return self.text[slice(*self.span(run))]

    def holding_answers(self, answers: Sequence[str]) -> list[bool]:
        """Return for each segment whether it holds an answer or a part of one, as whole words, in upper or lower case.

        In scripts without spaces between words, such as Chinese and Japanese, a match may be anywhere.
        """
        return self._matching(_whole_words(answer.strip()) for answer in answers if answer.strip())

    def quoted(self, parts: Sequence[str]) -> list[bool]:
        """Return for each segment whether it holds one of these quotations or a part of one, matched exactly."""
        return self._matching(re.escape(part) for part in parts)

    def _matching(self, patterns: Iterable[str]) -> list[bool]:
        spans = [match.span() for pattern in patterns for match in re.finditer(pattern, self.text)]
        return [any(a < end and start < b for a, b in spans) for start, end in pairwise(self.bounds)]


def segment_runs(passages: Sequence[RamSegments], kept: Sequence[bool]) -> list[list[SegmentRun]]:
    """Return the runs of each passage of a prompt, in order (eq. 6); `kept` says for all segments which stay text."""
    done: list[list[SegmentRun]] = []
    start = 0
    for passage in passages:
        fates = kept[start : start + len(passage.ids)]
        groups = [(fate, list(members)) for fate, members in groupby(range(len(fates)), key=fates.__getitem__)]
        done.append([SegmentRun(fate, members[0], members[-1] + 1) for fate, members in groups])
        start += len(fates)
    return done


def slots_of_runs(vectors: Tensor, counts: Tensor, layouts: Sequence[Sequence[SegmentRun]]) -> list[PassageSlots]:
    """Return each skimmed run's slots, in order (empty if those segments are dropped); `layouts` is of `segment_runs`.

    Shape: (skimmed segments, dim) or (0, dim), source tokens of each (skimmed segments,)
    """
    sizes = [run.end - run.start if len(vectors) else 0 for runs in layouts for run in runs if not run.kept]
    pairs = zip(vectors.split(sizes), counts[: len(vectors)].split(sizes), strict=True)
    return [PassageSlots(slots, tokens) for slots, tokens in pairs]


def passages_with_holes(
    passages: Sequence[RamSegments], layouts: Sequence[Sequence[SegmentRun]], holes: Iterator[str]
) -> list[str]:
    """Return each passage as a prompt shows it: kept runs as text, the next of `holes` (a marker) for a skimmed run."""
    return [
        "".join(passage.text_of(run) if run.kept else next(holes) for run in runs)
        for passage, runs in zip(passages, layouts, strict=True)
    ]


def _whole_words(answer: str) -> str:
    """Return a pattern that finds the answer, but not inside a word."""
    before, after = (re.match(rf"[{_UNSPACED}]", edge) is None for edge in (answer[0], answer[-1]))
    found = rf"(?<!{_SPACED_LETTER}){re.escape(answer)}" if before else re.escape(answer)
    return rf"(?i){found}(?!{_SPACED_LETTER})" if after else f"(?i){found}"


class RamConfig(MethodConfig):
    """The settings of RAM (Read As Human): the segments that a question needs stay text, and the rest is skimmed.

    A segment has `segment_tokens` tokens. The paper names no adapters; we read this as full training. `close_reading:
    false` skims every segment. `skimming` pools a skimmed segment with weights from the question ("query"), as a plain
    "average", or drops it ("none"). These switches are the ablations of section 4.5.
    """

    paper = "Read As Human: Compressing Context via Parallelizable Close Reading and Skimming"

    name: Literal["ram"] = "ram"
    segment_tokens: int = Field(default=50, gt=0)
    encoder: TuneConfig = TuneConfig(mode="full")
    decoder: TuneConfig = TuneConfig(mode="full")
    close_reading: bool = True
    skimming: Literal["query", "average", "none"] = "query"

    @model_validator(mode="after")
    def _something_is_read(self) -> Self:
        if not self.close_reading and self.skimming == "none":
            raise ValueError("close_reading: false and skimming: none leave nothing to read: change one of them")
        return self

    def check_ratios(self, base_ratio: int, ratios: Sequence[int]) -> None:
        """Check the ratios. `ratios` say how many times shorter a prompt's context becomes, and a segment is one slot.

        Raises RatioError if one of `ratios` is below 2, or if `base_ratio` is not `segment_tokens`.
        """
        if base_ratio != self.segment_tokens:
            raise RatioError(
                f"ratio {base_ratio}: ram stores one vector for each segment of {self.segment_tokens} tokens: leave "
                "out the store's ratio, and give one with each question; train with stage: ram and this base_ratio"
            )
        if (least := min(ratios)) < 2:
            raise RatioError(f"ratio={least}: a ram bundle needs a ratio of 2 or more")

    def compressor(self, backbone: Backbone) -> "RamCompressor":
        return RamCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> Reader:
        # W_align of eq. 5 is the reader's map; without skimming it has nothing to map.
        projection = None if self.skimming == "none" else LinearMap(compressor.dim, backbone.dim)
        return Reader(backbone, projection, self.decoder)


class RamCompressor(TrunkCompressor, TokenCompressor):
    """A compressor whose encoder reads each segment, and the question, separately and causally (section 3.1).

    For each segment of a passage the store holds one slot, its representation r_i (eq. 1), which needs no question. At
    question time the question is encoded, and segments are chosen by the stored r_i. The chosen segments stay text.
    Only the others are read again, to be pooled with weights from the question.

    L_org of eq. 3, "the token length of original input", counts the passages without the question, as in section 4.3.
    """

    needs_question = True

    def __init__(self, backbone: Backbone, config: RamConfig) -> None:
        super().__init__(backbone, config.encoder)
        self.config = config

    def merge_factor(self, ratio: int, stored: int) -> int:
        """Raise a ConfigError, because the stored slots only serve to choose segments."""
        raise ConfigError(
            "a ram bundle reads passages question by question: give the question and a ratio to the postprocessor or "
            "to `mark_texts`, in place of a token budget or `store.markers`"
        )

    def check_ratio(self, ratio: int, stored: int) -> None:
        self.config.check_ratios(stored, [ratio])

    def render(
        self,
        store: Any,
        texts: Sequence[str],
        ids: Sequence[str],
        ratio: int | None,
        question: str | None,
        scope: str | None,
    ) -> list[str]:
        """Return stored passages as text with markers: segments that the question needs are text, the rest markers.

        Segments are chosen over all passages together (eq. 3), by their stored representations. Only the question and
        the skimmed segments are encoded. The parts of a passage keep their order (eq. 6), neighboring skimmed segments
        share a marker, and kept segments are the passage's own text. The decoder tokenizes it with the prompt around
        it, so if it begins or ends within a word, tokens at its edges may differ from those counted. The markers are
        for this question and this store object, whose memory keeps the last 16,384 slots.

        `ratio` is the paper's alpha, the factor by which all passages together become shorter; None is the bundle's
        smallest. Raises ConfigError if there is no question, or it is longer than the model's window, or more slots are
        made than the store object can keep; FingerprintMismatchError if a passage is cut otherwise than when stored.
        """
        question, question_ids = self._checked(question)
        if not texts:
            return []
        passages = [RamSegments.of(self.backbone.tokenizer, text, self.config.segment_tokens) for text in texts]
        represented = _representations(store, ids, passages, scope)
        asked = self.question(question_ids)
        reduction = min(store.bundle.config.ratios) if ratio is None else ratio
        counts = torch.tensor([count for passage in passages for count in passage.token_counts])
        kept = self.choose(asked.cpu(), represented, counts, reduction)
        layouts = segment_runs(passages, kept)
        runs = [(passage, run) for passage, own in zip(passages, layouts, strict=True) for run in own if not run.kept]
        segments = [segment for passage, run in runs for segment in passage.ids[run.start : run.end]]
        vectors = self.skim(segments, asked)
        softs = slots_of_runs(vectors, torch.tensor([len(segment) for segment in segments]), layouts)
        parts = [
            TransientPart(
                passage.text_of(run),
                soft.soft_context(),
                (question, str(reduction), passage.text, *map(str, passage.span(run))),
            )
            for (passage, run), soft in zip(runs, softs, strict=True)
        ]
        return passages_with_holes(passages, layouts, iter(store.transient_markers(parts, scope)))

    def _checked(self, question: str | None) -> tuple[str, list[int]]:
        """Return the question and its token ids; raise a ConfigError if the model cannot read the question."""
        window = self.backbone.window
        if not (question and question.strip()):
            raise ConfigError(
                "a ram bundle needs the question: give it to compress_documents (LangChain; a "
                "ContextualCompressionRetriever does), as query_bundle or query_str (LlamaIndex), or as question= of "
                "mark_texts"
            )
        check_text_length("the question", len(question), window)
        ids = text_ids(self.backbone.tokenizer, question)
        if not ids:
            raise ConfigError(f"the question {question!r} has no tokens: ask something")
        if window is not None and len(ids) >= window:  # BOS takes a place, too
            raise ConfigError(f"the question has {len(ids)} tokens, too many for a window of {window}: shorten it")
        return question, ids

    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> dict[int, SlotBatch]:
        """Return the slots to store, r_i of each segment; raise RatioError for another ratio than `segment_tokens`."""
        size = self.config.segment_tokens
        for ratio in ratios:
            self.check_ratio(ratio, ratio)
        padding = (0, -input_ids.shape[1] % size)
        ids = F.pad(input_ids, padding).unflatten(1, (-1, size))
        mask = F.pad(attention_mask, padding).unflatten(1, (-1, size))
        counts = mask.sum(-1)
        real = counts > 0
        means = segment_means(self.read(ids[real], mask[real]), mask[real])
        rows = means.split(real.sum(1).tolist())
        return {size: SlotBatch(nn.utils.rnn.pad_sequence(list(rows), batch_first=True), counts)}

    def read(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden states (texts, length, dim) of right-padded texts (texts, length), each read alone."""
        input_ids, attention_mask, first = self.behind_bos(input_ids, attention_mask)
        with self.trunk() as trunk:
            hidden: Tensor = trunk(
                **self.backbone.inputs.of(self.backbone.inputs.embed(input_ids), input_ids),
                attention_mask=attention_mask,
                position_ids=torch.arange(input_ids.shape[1], device=input_ids.device).expand(len(input_ids), -1),
                use_cache=False,
            ).last_hidden_state
        return hidden[:, first:].float()

    def choose(self, question: Tensor, segments: Tensor, counts: Tensor, reduction: int) -> list[bool]:
        """Return for each segment whether it stays text, as the k nearest to the question do (eq. 3).

        The paper writes eq. 2 as a softmax over dot products but calls it cosine. Eq. 8, which trains the choice, uses
        cosine, and so does this method. A softmax keeps the order, so none is applied. Of equals, the earlier stays.

        The paper cuts segments from one input, of which only the last is shorter. Here every passage may end in a short
        segment, so the nearest segments that together have at most k * `segment_tokens` tokens are kept.

        Shape: r_q (dim,), all segments' r_i (segments, dim), tokens (segments,), int64, whose sum is L_org. `reduction`
        is the paper's alpha, the factor by which the context becomes shorter.
        """
        size = self.config.segment_tokens
        k = int(counts.sum()) // (reduction * size) if self.config.close_reading else 0
        order = segment_relevance(question, segments).argsort(descending=True, stable=True)
        kept = torch.zeros_like(counts, dtype=torch.bool)
        kept[order] = counts[order].cumsum(0) <= k * size
        chosen: list[bool] = kept.tolist()
        return chosen

    def condense(self, hidden: Tensor, attention_mask: Tensor, question: Tensor) -> Tensor:
        """Return a vector for each skimmed segment: c_i (eq. 4), or what the ablations of section 4.5 use in its place.

        Shape: (segments, length, dim), (segments, length), (dim,) -> (segments, dim), (0, dim) if `skimming` is "none"
        """
        if self.config.skimming == "none":
            return hidden.new_zeros(0, self.dim)
        if self.config.skimming == "average":
            return segment_means(hidden, attention_mask)
        return skimmed_slots(hidden, attention_mask, question)

    @torch.inference_mode()
    def question(self, ids: Sequence[int]) -> Tensor:
        """Return r_q, the representation of a question with these token ids: (dim,)."""
        input_ids, mask = pad_token_ids([ids], self.backbone.device)
        return segment_means(self.read(input_ids, mask), mask)[0]

    @torch.inference_mode()
    def skim(self, segments: Sequence[Sequence[int]], question: Tensor) -> Tensor:
        """Read segments, given as token ids, and return a vector of each (`condense`), (segments, dim), on the CPU.

        `question` is r_q (dim,). With `skimming` "none" in the config the result is (0, dim).
        """
        done = [torch.zeros(0, self.dim)]
        rows = max(1, self.batch_tokens // self.config.segment_tokens)
        for start in range(0, len(segments) if self.config.skimming != "none" else 0, rows):
            ids, mask = pad_token_ids(segments[start : start + rows], self.backbone.device)
            done.append(self.condense(self.read(ids, mask), mask, question).cpu())
        return torch.cat(done)


def segment_means(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the mean of each text's hidden states (texts, length, dim), without padding (eq. 1): (texts, dim)."""
    weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def segment_relevance(question: Tensor, segments: Tensor) -> Tensor:
    """Return the cosine of the question (dim,) and each segment, (segments,) (eq. 8; `RamCompressor.choose`: eq. 2)."""
    return F.cosine_similarity(question.unsqueeze(0), segments, dim=-1)


def skimmed_slots(hidden: Tensor, attention_mask: Tensor, question: Tensor) -> Tensor:
    """Return the sum of each segment's hidden states, weighted by the softmax of their cosine with r_q (eq. 4).

    Shape: (segments, length, dim), (segments, length), (dim,) -> (segments, dim)
    """
    similarity = F.cosine_similarity(hidden, question, dim=-1).masked_fill(attention_mask == 0, float("-inf"))
    return (similarity.softmax(-1).unsqueeze(-1) * hidden).sum(1)


def _representations(store: Any, ids: Sequence[str], passages: Sequence[RamSegments], scope: str | None) -> Tensor:
    """Return the stored r_i of all segments: (segments, dim)."""
    stored = store.get(ids, scope, [passage.text for passage in passages])
    for id, soft, passage in zip(ids, stored, passages, strict=True):
        if soft is None or soft.token_counts.tolist() != passage.token_counts:
            raise FingerprintMismatchError(
                f"passage {id!r} is now cut into {len(passage.ids)} segments, unlike when it was stored: its text or "
                "the decoder's tokenizer changed since; delete the passage from the store and add it again"
            )
    return torch.cat([torch.from_numpy(soft.slots) for soft in stored if soft is not None])
