"""A table's rows as tasks of the dot-product interface (In-Context Optimization, section 4.3, appendix D)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from linear_rag.normalization import Normalizer, z_score
from linear_rag.tables import Table
from linear_rag.tasks import LinearTasks, dot_product_tasks

SIGMA = 0.1 * 12**-0.5
"""Standard deviation of W_z and M: W2 is as large as in section 4.1, whose documents have variance 1/12, not 1."""


@dataclass(frozen=True)
class TabularTasks:
    """A source of tasks whose examples, query and documents are rows of one table, all drawn with replacement.

    Attributes:
        rows, targets: rows that examples are drawn from, shapes (n, d), (n,).
        queries, query_targets: rows that queries are drawn from, shapes (m, d), (m,).
        corpus: rows that documents are drawn from, shape (n, d).
        w_z, similarity: shapes (1, d), (d, d).
        documents: k.
        examples: N.
        teachers: whether a task's targets come from its own linear teacher, as in section 4.1, and not from the table.
    """

    rows: Tensor
    targets: Tensor
    queries: Tensor
    query_targets: Tensor
    corpus: Tensor
    w_z: Tensor
    similarity: Tensor
    documents: int
    examples: int
    teachers: bool

    def sample(self, count: int, generator: Generator) -> LinearTasks:
        """Draw `count` tasks; documents are the k rows of the corpus with the largest dot product with the query."""
        examples = torch.randint(len(self.rows), (count, self.examples), generator=generator)
        query = torch.randint(len(self.queries), (count, 1), generator=generator)
        x = torch.cat([self.rows[examples], self.queries[query]], dim=1)
        if self.teachers:
            y = x @ torch.randn(count, x.shape[-1], 1, generator=generator)
        else:
            y = torch.cat([self.targets[examples], self.query_targets[query]], dim=1).unsqueeze(-1)
        documents = (x[:, -1] @ self.corpus.T).topk(self.documents, dim=1).indices
        return dot_product_tasks(x, y, self.corpus[documents], self.w_z, self.similarity)


def split(
    table: Table,
    normalization: Callable[[Tensor], Normalizer],
    *,
    seed: int = 0,
    documents: int = 5,
    examples: int = 10,
    teachers: bool = False,
) -> tuple[TabularTasks, TabularTasks]:
    """Return tasks for training, and held-out tasks, whose queries are the tenth of the rows not used in training.

    The corpus is always the training rows by z-score. `normalization`, for the inputs, is also fitted on the training
    rows. Targets are z-scores; the paper leaves this open.

    Args:
        table: the data set.
        normalization: one of `normalization.NORMALIZATIONS`.
        seed: draws the split, W_z and M.
        documents: k.
        examples: N.
        teachers: see `TabularTasks`.
    """
    generator = Generator().manual_seed(seed)
    train, test = torch.randperm(len(table.target), generator=generator).tensor_split([len(table.target) * 9 // 10])
    width = table.features.shape[1]
    rows = table.features[train]
    normalize = normalization(rows)
    target_score = z_score(table.target[train, None])
    targets = target_score(table.target[:, None]).flatten()
    training = TabularTasks(
        rows=normalize(rows),
        targets=targets[train],
        queries=normalize(rows),
        query_targets=targets[train],
        corpus=z_score(rows)(rows),
        w_z=SIGMA * torch.randn(1, width, generator=generator),
        similarity=SIGMA * torch.randn(width, width, generator=generator),
        documents=documents,
        examples=examples,
        teachers=teachers,
    )
    return training, replace(training, queries=normalize(table.features[test]), query_targets=targets[test])
