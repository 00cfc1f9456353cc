"""Several passages: prompts and thresholds, against plain computations."""

import random

from benchmarks.scoring.confidence import Sure, best_threshold
from benchmarks.several.neighbors import NEAREST, among_neighbors
from benchmarks.world.world import world_examples
from ctx_compress_rag.models.sentence_embedding import embed_passages
from ctx_compress_rag.text.answers import mentions_answer


def test_distractors_are_near_without_the_answer_and_the_evidence_stays() -> None:
    examples = world_examples("test", 0, 60, 1, (1,))
    passages = list(dict.fromkeys(e.passages[0] for e in examples))
    cosines = embed_passages(passages) @ embed_passages(passages).T
    several = 0
    for before, after in zip(examples, among_neighbors(examples, [1, 3]), strict=True):
        own = before.passages[0]
        others = [passage for passage in after.passages if passage != own]
        assert len(others) == len(after.passages) - 1
        allowed = [not mentions_answer(passage, before.turns[0].answers) for passage in passages]
        near = [place for place in (-cosines[passages.index(own)]).argsort() if allowed[place]]
        assert {*others} <= {passages[place] for place in near[:NEAREST]}
        assert all(part in own and before.turns[0].answers[0] in part for part in after.turns[0].evidence)
        several += len(others) == 2
    assert 10 < several < 50


def test_no_threshold_scores_higher_than_the_best() -> None:
    draw = random.Random(0)
    for _ in range(50):
        answers = [Sure(draw.gauss(0, 1), draw.random(), draw.random() < 0.5) for _ in range(draw.randint(1, 12))]
        best = sum(a.score(best_threshold(answers)) for a in answers)
        for threshold in (-9.0, *(draw.gauss(0, 1) for _ in range(30)), 9.0):
            declining = [a.logprob < threshold for a in answers]
            scores = [float(not a.answerable) if d else a.f1 for d, a in zip(declining, answers, strict=True)]
            assert sum(scores) <= best + 1e-9
