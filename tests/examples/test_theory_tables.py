"""Normalization, tables and an MLP (In-Context Optimization, section 4.3, appendices D, F)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import preprocessing
from torch import Generator, Tensor

from linear_rag.comparison import gradient_descent
from linear_rag.nonlinear import MLP, after
from linear_rag.normalization import NORMALIZATIONS
from linear_rag.tables import Table, from_csv, stand_ins
from linear_rag.tabular import split


def skewed_rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, generator=Generator().manual_seed(seed), dtype=torch.float64).exp()


# Normalization


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_normalizations_are_scikit_learns_and_scipys(name: str) -> None:
    """On the rows they were fitted on and on others, which may lie outside."""
    rows, others = skewed_rows(50), skewed_rows(20, seed=1) * 2
    rows[10:14] = rows[3]  # ties
    z = preprocessing.StandardScaler().fit(rows.numpy())
    scale = preprocessing.MinMaxScaler().fit(rows.numpy())
    expected = {
        "z-score": z.transform,
        "min-max": scale.transform,
        "tanh": lambda x: np.tanh(z.transform(x)),
        "rank": lambda x: np.array(
            [[stats.percentileofscore(rows[:, j], v, "mean") / 100 for j, v in enumerate(row)] for row in x]
        ),
    }[name]
    normalize = NORMALIZATIONS[name](rows)
    for each in (rows, others):
        torch.testing.assert_close(
            normalize(each).double(), torch.as_tensor(expected(each.numpy())), rtol=1e-6, atol=1e-6
        )
    torch.testing.assert_close(normalize(others.reshape(4, 5, 3)), normalize(others).reshape(4, 5, 3))


# Tables


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_a_file_is_read_by_its_columns_names(tmp_path: Path, delimiter: str) -> None:
    rows = [["id", "Gender", "Age", "Calories"], ["1", "male", "31", "40.5"], ["2", "female", "8.5", "-3"]]
    file = tmp_path / "calories.csv"
    file.write_text("\n".join(delimiter.join(row) for row in rows), encoding="utf-8")
    table = from_csv(file, "Calories", "Age, Gender")
    assert table.features.tolist() == [[31, 1], [8.5, 0]] and table.target.tolist() == [40.5, -3]
    with pytest.raises(ValueError, match="no column 'Weight'.*Gender"):
        from_csv(file, "Calories", "Weight")
    file.write_text(file.read_text(encoding="utf-8").replace("31", ""), encoding="utf-8")
    with pytest.raises(ValueError, match="row 1 has no 'Age'"):
        from_csv(file, "Calories", "Age")


# Tasks


def test_tasks_are_rows_of_the_table() -> None:
    """Targets belong to their rows, queries are held out, documents have the largest dot products."""
    features = torch.randn(200, 4, generator=Generator().manual_seed(0)).exp()
    training, held_out = split(Table(features, features.sum(dim=1)), NORMALIZATIONS["min-max"], documents=3, examples=6)
    seen = {tuple(row) for row in training.queries.tolist()}
    assert len(seen) == 180 and not seen & {tuple(row) for row in held_out.queries.tolist()}
    assert seen == {tuple(row) for row in training.rows.tolist()} == {tuple(row) for row in held_out.rows.tolist()}
    torch.testing.assert_close(training.corpus.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
    assert float(training.rows.min()) == 0 and float(training.rows.max()) == 1

    tasks = held_out.sample(50, Generator().manual_seed(1))
    assert tasks.context.shape == (50, 6, 9)
    lookup = dict(zip(map(tuple, training.rows.tolist()), training.targets.tolist(), strict=True))
    for row in tasks.context.flatten(0, 1).tolist():
        assert row[:4] == row[4:8] and lookup[tuple(row[:4])] == row[8]
    lookup = dict(zip(map(tuple, held_out.queries.tolist()), held_out.query_targets.tolist(), strict=True))
    for x, y, w2 in zip(tasks.x, tasks.target, tasks.w2, strict=True):
        assert lookup[tuple(x.tolist())] == y
        nearest = sorted(training.corpus, key=lambda row: -float(row @ x))[:3]
        expected = sum(training.w_z @ torch.outer(d, d) @ training.similarity.T for d in nearest)
        torch.testing.assert_close(w2, expected)


# After an MLP


def small() -> Table:
    return Table(*(t[:300] for t in (stand_ins()["Friedman"].features, stand_ins()["Friedman"].target)))


def test_sensitivities_go_through_the_mlp() -> None:
    """The chain rule, with the MLP's Jacobian by finite differences."""
    training, _ = split(small(), NORMALIZATIONS["z-score"], examples=5)
    tasks = training.sample(6, Generator().manual_seed(0))
    tasks = replace(tasks, context=tasks.context.double(), x=tasks.x.double(), w2=tasks.w2.double())
    mlp = MLP(10, Generator().manual_seed(1)).double().requires_grad_(False)
    step = after(mlp, gradient_descent(0.3))
    examples, y = mlp(tasks.context[..., :10]), tasks.context[..., -1:]
    w2 = tasks.w2
    residual = examples @ w2.mT - y  # W1 starts at zero
    gradient = residual.mT @ examples / 5
    weights = (w2 - 2 * 0.3 * gradient).squeeze(1)  # W1 and W2 meet the same features
    torch.testing.assert_close(step(tasks, tasks.x), (weights * mlp(tasks.x)).sum(-1))
    x = tasks.x.clone().requires_grad_()
    (actual,) = torch.autograd.grad(step(tasks, x).sum(), x)
    for j in range(10):
        nudge = 1e-6 * torch.eye(10, dtype=torch.float64)[j]
        slope = (weights * (mlp(tasks.x + nudge) - mlp(tasks.x - nudge))).sum(-1) / 2e-6
        torch.testing.assert_close(actual[:, j], slope, rtol=1e-6, atol=1e-6)
