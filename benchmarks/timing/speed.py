"""What compression costs and saves: indexing against the encoder alone, first token against full text."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from statistics import median

from tqdm.auto import tqdm

from benchmarks.timing.phases import measured
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.methods.base.compressor import TokenizedPassage
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, question_messages

FIRST_TOKEN = Sampling(max_tokens=1)
"""Generates one token, to time the first one."""

_PASSAGES_PER_ROUND = 60


@dataclass(frozen=True)
class IndexingSpeed:
    """Speed of adding passages to a store on disk, against the encoder's forward passes on the same tokens.

    Attributes:
        passages, tokens: how much was indexed.
        passages_per_second: through the store: tokenizing, encoding, quantizing and writing.
        forward_passages_per_second: through the encoder alone, from token ids.
        ratio: median over rounds of store time / forward time; 1 means that storing takes no extra time.
        disk_bytes: size of the Chroma folder.
        payload_bytes: size of the stored slots.
    """

    passages: int
    tokens: int
    passages_per_second: float
    forward_passages_per_second: float
    ratio: float
    disk_bytes: int
    payload_bytes: int


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token, from markers (fetched from Chroma) and from full text, in turn.

    Attributes:
        soft_seconds, text_seconds: medians.
        ratio: median over rounds of soft time / text time.
        soft_tokens, text_tokens: prompt lengths, a slot counting as one.
        read_seconds: median time until the soft prompt's vectors are ready: markers verified, slots fetched, unpacked
            and mapped by the reader, text tokenized. It is part of `soft_seconds`.
    """

    soft_seconds: float
    text_seconds: float
    ratio: float
    soft_tokens: int
    text_tokens: int
    read_seconds: float

    @property
    def share(self) -> float:
        """Speed-up / reduction of prompt tokens: 1 if time shrinks in proportion to the prompt."""
        return self.soft_tokens / self.text_tokens / self.ratio


def indexing_speed(bundle: Bundle, passages: Sequence[str], folder: str | Path, progress: bool = True) -> IndexingSpeed:
    """Index `passages` into a new store at `folder`; in each round, time the encoder alone on the same tokens, too."""
    encoded = bundle.tokenizer(list(passages), add_special_tokens=False, verbose=False)["input_ids"]
    tokenized = [TokenizedPassage(text, ids) for text, ids in zip(passages, encoded, strict=True)]
    ratio, window = bundle.config.base_ratio, bundle.config.window
    forward: list[float] = []
    stored: list[float] = []
    bundle.compress(passages[:1])  # loads the decoder
    with SoftContextStore(folder, bundle) as store:
        rounds = range(0, len(passages), _PASSAGES_PER_ROUND)
        for start in tqdm(rounds, desc="indexing", unit="round", disable=not progress):
            part = slice(start, start + _PASSAGES_PER_ROUND)
            forward.append(seconds_of(partial(bundle.compressor.compress, tokenized[part], ratio, window)))
            stored.append(seconds_of(partial(store.add, list(passages[part]), progress=False)))
        info = store.info()
    return IndexingSpeed(
        passages=len(passages),
        tokens=sum(map(len, encoded)),
        passages_per_second=len(passages) / sum(stored),
        forward_passages_per_second=len(passages) / sum(forward),
        ratio=median(s / f for s, f in zip(stored, forward, strict=True)),
        disk_bytes=info.disk_bytes or 0,
        payload_bytes=info.payload_bytes,
    )


def first_token(
    bundle: Bundle,
    passages: Sequence[str],
    ratios: Sequence[int],
    rounds: int = 7,
    opened: Callable[[Bundle, SoftContextStore], Decoder] = Decoder,
) -> dict[int, FirstToken]:
    """Time to the first token with `passages` as markers at each ratio and as text, in turn, after a warm-up round.

    `opened` makes the decoder, which may be in a server.
    """
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, bundle) as store:
        decoder = opened(bundle, store)
        store.ensure(list(passages))
        contents = [*(mark_texts(store, passages, ratio=ratio) for ratio in ratios), passages]
        found = [[_first_piece(decoder, content) for content in contents] for _ in range(rounds + 1)][1:]
    *softs, texts = zip(*found, strict=True)
    return {
        ratio: FirstToken(
            soft_seconds=median(each.seconds for each in soft),
            text_seconds=median(each.seconds for each in texts),
            ratio=median(one.seconds / other.seconds for one, other in zip(soft, texts, strict=True)),
            soft_tokens=soft[-1].tokens,
            text_tokens=texts[-1].tokens,
            read_seconds=median(each.reading for each in soft),
        )
        for ratio, soft in zip(ratios, softs, strict=True)
    }


def first_token_table(found: Mapping[int, FirstToken]) -> str:
    """The times at each ratio as a Markdown table."""
    return report.markdown_table(
        [
            {
                "ratio": f"{ratio}x",
                "prompt tokens, soft and text": f"{first.soft_tokens:,}, {first.text_tokens:,}",
                "cut": f"{first.text_tokens / first.soft_tokens:.1f}",
                "ms to first token, soft and text": f"{first.soft_seconds * 1e3:.0f}, {first.text_seconds * 1e3:.0f}",
                "of which until the vectors are there": f"{first.read_seconds * 1e3:.0f}",
                "speed-up": f"{1 / first.ratio:.1f}",
                "speed-up over cut": f"{first.share:.2f}",
            }
            for ratio, first in found.items()
        ]
    )


def speed_table(speed: IndexingSpeed) -> str:
    """The result as a Markdown table."""
    rows = {
        "passages (tokens) indexed": f"{speed.passages:,} ({speed.tokens:,})",
        "passages per second through the store": f"{speed.passages_per_second:.1f}",
        "passages per second, encoder alone": f"{speed.forward_passages_per_second:.1f}",
        "time through the store over the encoder's own (median of rounds)": f"{speed.ratio:.2f}",
        "bytes on disk over payload bytes": f"{speed.disk_bytes / speed.payload_bytes:.2f}",
    }
    return measured(rows)


@dataclass(frozen=True)
class _Asked:
    """One prompt: seconds to the first token, seconds until the prompt's vectors were ready, prompt tokens."""

    seconds: float
    reading: float
    tokens: int


def _first_piece(decoder: Decoder, contents: Sequence[str]) -> _Asked:
    # Each prompt begins differently: a server would reuse what it has read of a common beginning.
    context = PASSAGE_SEPARATOR.join([token_hex(4), *contents])
    chat = [dict(message) for message in question_messages(TEMPLATES[0], context, "What is it about?")]
    reading = seconds_of(partial(decoder.preparer.prepare, [chat]))
    started = time.perf_counter()
    [answer] = decoder.generate([chat], FIRST_TOKEN)
    return _Asked(time.perf_counter() - started, reading, answer.prompt_tokens)


def seconds_of(run: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
