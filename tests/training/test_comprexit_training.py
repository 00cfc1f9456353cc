"""ComprExIT's training (section 3.3): its loss, its two phases and their recipes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.stages.answer import NextTokenCollator
from helpers import architectures

TEXT = "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast."


@given(length=st.integers(2, 90), context=st.integers(1, 60), continuation=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_next_token_cuts(tiny_tokenizer: Any, length: int, context: int, continuation: int) -> None:
    """A text's beginning is compressed, and what follows it is predicted; of a short text nothing is left out."""
    text = tiny_tokenizer.decode([(37 * i) % 500 + 20 for i in range(length)])
    whole = tiny_tokenizer(f"Pell.\n\n{text}", add_special_tokens=False)["input_ids"]
    batch = NextTokenCollator(tiny_tokenizer, context, continuation)([Example(("Pell.", text), (Turn("", ("",)),))])
    [row], [passage] = batch["prompts"].prompts, batch["passages"]
    beginning, (before, rest) = passage.ids, row.ids
    assert beginning + rest.tolist() == whole[: context + continuation]
    assert passage.text == tiny_tokenizer.decode(beginning)
    assert before.tolist() == [] and [a.tolist() for a in row.answers] == [[], [True] * len(rest)]
    wanted = len(beginning + rest.tolist()) * context // (context + continuation)
    assert len(beginning) == max(1, wanted) and len(rest) >= 1


def test_a_bos_stands_before_the_slots_and_single_tokens_are_refused() -> None:
    tokenizer = architectures.tokenizer("Llama")
    batch = NextTokenCollator(tokenizer, 8, 4)([Example((TEXT,), (Turn("", ("",)),))])
    [row] = batch["prompts"].prompts
    assert row.ids[0].tolist() == [tokenizer.bos_token_id] and not row.answers[0].any()
    unused = architectures.tokenizer("Phi3")  # it has a BOS, and puts it nowhere
    assert unused.bos_token_id is not None and unused("", verbose=False)["input_ids"] == []
    [row] = NextTokenCollator(unused, 8, 4)([Example((TEXT,), (Turn("", ("",)),))])["prompts"].prompts
    assert row.ids[0].tolist() == []
    with pytest.raises(DataError, match="'a'"):
        NextTokenCollator(tokenizer, 8, 4)([Example(("a",), (Turn("", ("",)),))])


def test_a_control_token_in_a_text_is_text() -> None:
    """As the store has it: the passage that is compressed in training is the one that is compressed in use."""
    tokenizer = architectures.tokenizer("Llama")
    text = f"{TEXT}{tokenizer.eos_token}{TEXT}"
    batch = NextTokenCollator(tokenizer, 200, 100)([Example((text,), (Turn("", ("",)),))])
    [row] = batch["prompts"].prompts
    read = [*batch["passages"][0].ids, *row.ids[1].tolist()]
    assert tokenizer.eos_token_id in tokenizer(text)["input_ids"]
    assert tokenizer.eos_token_id not in read and tokenizer.decode(read) == text
