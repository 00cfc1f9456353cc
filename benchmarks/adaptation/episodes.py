"""Episodes to score with: each question of a file once, and demonstrations from another part of the file."""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import asdict
from itertools import zip_longest

from ctx_compress_rag.adaptation.stages import AdaptationTasks, Episode
from ctx_compress_rag.errors import DataError

_POOL = 8  # a file keeps at most this many questions for demonstrations, times those of one question


def drawn_apart(
    tasks: AdaptationTasks, asked: int, tuning: int, demonstrations: int
) -> tuple[list[Episode], list[Episode]]:
    """At most `asked` episodes to score with, and `tuning` to choose settings with; no question is in both.

    Questions of each file in turn; those to choose with are of the part that demonstrations come from.

    Raises:
        DataError: a file has too few questions.
    """
    scored = _spread(tasks, asked, demonstrations, of_pool=False)
    # Two draws may share a name, and so ask the same question of different passages.
    questions = {episode.query.question for episode in scored}
    others = _spread(tasks, tuning, demonstrations, of_pool=True)
    return scored, [episode for episode in others if episode.query.question not in questions]


def _spread(tasks: AdaptationTasks, count: int, demonstrations: int, of_pool: bool) -> list[Episode]:
    each: list[list[Episode]] = []
    for name, examples in tasks.examples.items():
        rng = random.Random(f"0:{name}")
        shuffled = rng.sample(examples, len(examples))
        size = min(_POOL * demonstrations, len(examples) // 2)
        if size <= demonstrations:
            raise DataError(
                f"the task {name} has {len(examples)} questions: {demonstrations} demonstrations need "
                f"{2 * demonstrations + 2}, half of which only demonstrate"
            )
        pool, rest = shuffled[:size], shuffled[size:]
        each.append(
            [
                tasks.episode(name, rng.sample([e for e in pool if e is not query], demonstrations), query)
                for query in (pool if of_pool else rest)
            ]
        )
    in_turn = [episode for row in zip_longest(*each) for episode in row if episode is not None]
    return in_turn[:count]


def digest(episodes: Iterable[Episode]) -> str:
    """64 hex digits that identify the episodes' contents, whatever their files are called."""
    hashed = hashlib.sha256()
    for episode in episodes:
        hashed.update(json.dumps(asdict(episode)).encode())
    return hashed.hexdigest()
