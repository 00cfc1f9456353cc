"""Normalization, tables and an MLP (In-Context Optimization, section 4.3, appendices D, F)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import preprocessing
from torch import Generator, Tensor, nn

from linear_rag.boundary import align
from linear_rag.comparison import best_rate, compare, gradient_descent, loss, one_step_rate, trained
from linear_rag.nonlinear import MLP, after, embed
from linear_rag.normalization import NORMALIZATIONS
from linear_rag.tables import COLUMNS, Table, california_housing, from_csv, stand_ins
from linear_rag.tabular import split
from linear_rag.training import train_layer


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


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_a_column_of_one_value_does_not_divide_by_zero(name: str) -> None:
    rows = torch.full((5, 1), 7.0)
    assert torch.equal(NORMALIZATIONS[name](rows)(rows), torch.full((5, 1), 0.5 if name == "rank" else 0.0))


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


def test_californian_columns_are_those_scikit_learn_fetches(tmp_path: Path) -> None:
    """From scikit-learn's own cache, written here in its format: no network."""
    target, features = COLUMNS["California Housing"]
    stored = np.random.default_rng(0).uniform(1, 5, (7, 9))
    joblib.dump(stored, tmp_path / "cal_housing_py3.pkz")
    table = california_housing(str(tmp_path))
    assert table.features.shape == (7, len(features.split(","))) and target == "MedHouseVal"
    np.testing.assert_allclose(table.target * 100_000, stored[:, 0], rtol=1e-5)
    np.testing.assert_allclose(table.features[:, features.split(", ").index("MedInc")], stored[:, 1], rtol=1e-5)


def test_stand_ins_are_whole_and_two_are_skewed() -> None:
    tables = stand_ins()
    for table in tables.values():
        assert len(table.features) == len(table.target) > 400
        assert bool(table.features.isfinite().all()) and float(table.target.std()) > 0
    even, skewed = tables["Friedman"], tables["Friedman, skewed"]
    assert torch.equal(even.target, skewed.target)
    assert torch.equal(even.features.argsort(dim=0), skewed.features.argsort(dim=0))
    assert float(tables["breast cancer"].target.max()) == 2501  # mean area, which is not among the features
    assert float(tables["breast cancer"].features.max()) < 1000


def test_skewness_is_scipys() -> None:
    rows = skewed_rows(500) * torch.tensor([1, -1, 1])
    expected = np.abs(stats.skew(rows.numpy())).mean()
    assert Table(rows, rows[:, 0]).skewness() == pytest.approx(expected)


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


def test_teachers_are_linear_in_the_inputs() -> None:
    training, _ = split(stand_ins()["diabetes"], NORMALIZATIONS["z-score"], teachers=True, examples=30)
    tasks = training.sample(20, Generator().manual_seed(0))
    x, y = tasks.context[..., :10].double(), tasks.context[..., -1:].double()
    teacher = torch.linalg.lstsq(x, y).solution
    torch.testing.assert_close(x @ teacher, y, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        (tasks.x.double() @ teacher.squeeze(-1).T).diagonal(), tasks.target.double(), atol=1e-3, rtol=0
    )
    assert float(teacher.std(dim=0).min()) > 0.5


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


def test_rate_of_one_step_is_the_searchs() -> None:
    training, _ = split(small(), NORMALIZATIONS["z-score"])
    tasks = training.sample(200, Generator().manual_seed(0))
    assert one_step_rate(tasks) == pytest.approx(best_rate(tasks), abs=0.005)
    scaled = embed(tasks, lambda x: x / 100)  # a rate far out of the search's range
    rate = one_step_rate(scaled)
    least = loss(gradient_descent(rate), scaled)
    assert rate > 100 and all(least < loss(gradient_descent(rate * factor), scaled) for factor in (0.9, 1.1))


def test_mlp_is_trained_with_the_layer() -> None:
    training, _ = split(small(), NORMALIZATIONS["z-score"])
    mlp = MLP(10, Generator().manual_seed(0))
    before = [p.detach().clone() for p in mlp.parameters()]
    layer = train_layer(training, steps=100, batch=64, learning_rate=0.02, embedding=mlp)
    assert not any(torch.equal(a, b) for a, b in zip(before, mlp.parameters(), strict=True))
    tasks = training.sample(500, Generator().manual_seed(1))
    with_mlp = loss(after(mlp, trained(layer)), tasks)
    assert with_mlp < 0.7 * float(tasks.target.square().mean())
    assert with_mlp < loss(after(nn.Identity(), trained(layer)), tasks)


def test_alignment_is_of_the_trained_model_and_repeats() -> None:
    """`align` by its parts, put together once more."""
    table, normalization = small(), NORMALIZATIONS["tanh"]
    actual = align(table, normalization, seed=4, steps=5)
    training, held_out = split(table, normalization, seed=4)
    generator = Generator().manual_seed(4)
    mlp = MLP(10, generator)
    layer = train_layer(training, steps=5, batch=128, seed=5, embedding=mlp)
    mlp.requires_grad_(False)
    fitted, tasks = training.sample(1000, generator), held_out.sample(1000, generator)
    model = after(mlp, trained(layer))
    on_inputs = compare(model, gradient_descent(one_step_rate(fitted)), tasks)
    assert asdict(actual.inputs) == pytest.approx(asdict(on_inputs), rel=1e-5)
    assert actual.features.loss == pytest.approx(actual.inputs.loss)
    assert actual == align(table, normalization, seed=4, steps=5)
    assert actual != align(table, normalization, seed=5, steps=5)
