"""Tasks from files, and the episodes drawn from them."""

from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag.adaptation.config import TaskData
from ctx_compress_rag.adaptation.episodes import AdaptationTasks
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.prompts import TrainingPromptBuilder


def test_files_are_tasks(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Support and question are of one file, never the same row, and cut to the tokens allowed."""
    for task in ("one", "two"):
        rows = [
            Example(
                (f"Passage {i} of {task}. " * 30, "Short."), (Turn(f"Question {i} of {task}?", (f"answer {i} " * 9,)),)
            )
            for i in range(5)
        ]
        write_jsonl(tmp_path / f"{task}.jsonl", rows)

    def tasks_of(*names: str) -> AdaptationTasks:
        files = [tmp_path / f"{name}.jsonl" for name in names]
        return AdaptationTasks(
            TaskData(files=files, max_context_tokens=40, max_answer_tokens=6), TrainingPromptBuilder(tiny_tokenizer)
        )

    tasks = tasks_of("one", "two")
    episodes = [tasks.draw(number, 3, seed=0) for number in range(30)]
    assert episodes[7] == tasks.draw(7, 3, seed=0) != tasks.draw(7, 3, seed=2)
    seen = set()
    for episode in episodes:
        seen.add(episode.task)
        whole = (*episode.support, episode.query)
        assert len({d.question for d in whole}) == 4
        for d in whole:
            assert episode.task in d.question and episode.task in d.passages[0]
            assert sum(len(tiny_tokenizer(p, add_special_tokens=False)["input_ids"]) for p in d.passages) <= 41
            assert len(tiny_tokenizer(d.answer, add_special_tokens=False)["input_ids"]) <= 7
    assert seen == {"one", "two"}
    rows = [Example((f"Passage {i}.",), (Turn(f"{i}?", (f"answer {i}",)),)) for i in range(25)]
    with pytest.raises(DataError, match="5 questions: 5 demonstrations"):
        tasks.draw(0, 5, seed=0)
    # A row given twice is one question: otherwise it could be asked when a demonstration has shown its answer.
    write_jsonl(tmp_path / "twice.jsonl", [*rows, *rows])
    assert tasks_of("twice").examples["twice"] == rows
    write_jsonl(tmp_path / "blank.jsonl", [*rows, Example(("A.",), (Turn("What is blank?", (" ",)),))])
    with pytest.raises(DataError, match=r"task blank: the first answer to 'What is blank\?' is blank"):
        tasks_of("blank")
    write_jsonl(tmp_path / "lonely.jsonl", rows[:1])
    with pytest.raises(DataError, match="lonely has one question"):
        tasks_of("lonely")
    with pytest.raises(DataError, match="one name"):
        tasks_of("one", "one")
