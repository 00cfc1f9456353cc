"""The lock that goes round: whoever has it again and again lets others in, in their order."""

import threading

from ctx_compress_rag.models.fair_lock import FairLock
from helpers.decoding import WAIT, wait_for


def test_each_waits_for_those_before_it() -> None:
    turns, order, threads = FairLock(), [], []

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        assert turns.held and not turns.waiting
        for number in range(5):
            thread = threading.Thread(target=take, args=(number,))
            thread.start()
            threads.append(thread)
            wait_for(lambda n=number: turns.waiting > n)
        assert turns.waiting
        with turns:  # reentrant, whoever waits
            assert order == []
    with turns:
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join(WAIT)
    assert not turns.held and not turns.waiting
