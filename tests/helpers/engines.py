"""What every engine does, in one matrix: a class of tests for each engine takes it as its base."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from helpers.decoding import QUESTION, WAIT, begun, wait_for

SCHEMA = '{"type": "object", "properties": {"built": {"type": "integer"}}, "required": ["built"]}'
ASKED: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "stop": {"stop": ["e", "a"]},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "sampled": {"max_tokens": 4, "temperature": 0.2, "seed": 7},  # the last bits soon decide a draw
    "quotation": {"extractive": True},
    "json": {"json_schema": SCHEMA},
}


class EngineTests:
    """Fixtures: `there`, the engine's decoder; `here`, transformers' of the same bundle and store; `prompts`.

    Attributes:
        cannot: names in `ASKED` of what the engine cannot do, or does otherwise.
        near: by how much a log-probability may differ.
    """

    cannot: frozenset[str] = frozenset()
    near = 1e-3

    @pytest.mark.parametrize("name", ASKED)
    def test_answers_and_streams_are_those_of_transformers(
        self, there: Decoder, here: Decoder, prompts: list[Any], name: str
    ) -> None:
        if name in self.cannot:
            pytest.skip(f"this engine: {name}")
        sampling = Sampling(**{"max_tokens": 10, **ASKED[name]})
        expected, found = here.generate(prompts, sampling), there.generate(prompts, sampling)
        *pieces, last = there.stream(prompts[0], sampling)
        assert isinstance(last, Generation) and "".join(map(str, pieces)) == last.text
        for one, other in zip([*expected, expected[0]], [*found, last], strict=True):
            assert plain(one) == plain(other)
            for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert mine.token == theirs.token and mine.logprob == pytest.approx(theirs.logprob, abs=self.near)
                if mine.top:  # of others, several may have the same letters
                    assert mine.top[0][1] == pytest.approx(theirs.top[0][1], abs=self.near)
        assert len({answer.text for answer in found}) > 1

    def test_many_callers_get_what_each_gets_alone(self, there: Decoder, prompts: list[Any]) -> None:
        sampling = Sampling(max_tokens=4)
        alone = [plain(there.generate([prompt], sampling)[0]) for prompt in prompts]
        with ThreadPoolExecutor(12) as pool:
            tasks = [pool.submit(there.generate, [prompt], sampling) for prompt in prompts * 3]
        assert [plain(task.result(WAIT)[0]) for task in tasks] == alone * 3

    def test_a_stream_that_is_left_ends(self, there: Decoder, prompts: list[Any]) -> None:
        got: list[Any] = []
        cancel: Future[Any] = Future()

        def put(piece: Any) -> None:
            got.append(piece)
            cancel.result(WAIT)()

        cancel.set_result(begun(there, prompts[0], Sampling(max_tokens=400), put))
        wait_for(lambda: got)
        assert there.generate([QUESTION], Sampling(max_tokens=1))
        pieces = there.stream(QUESTION, Sampling(max_tokens=400))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        seen = len(got)
        assert there.generate([QUESTION], Sampling(max_tokens=1)) and len(got) in (seen, seen + 1)
        assert not any(isinstance(piece, Generation) for piece in got)


def plain(answer: Generation) -> tuple[Any, ...]:
    """An answer without log-probabilities."""
    return answer.text, answer.prompt_tokens, answer.slots, answer.completion_tokens, answer.finish_reason
