"""Linear RAG (In-Context Optimization, sections 3, 4; appendices A-D, F): attention against autograd's steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor

from linear_rag.attention import LinearAttention, gradient_step_layer, stack
from linear_rag.comparison import best_rate, compare, gradient_descent, trained
from linear_rag.model import dot_product_weight, gradient_step, predict, projection_weight, rag_loss
from linear_rag.nonlinear import MLP, after
from linear_rag.normalization import NORMALIZATIONS
from linear_rag.tables import Table, from_csv, stand_ins
from linear_rag.tabular import split
from linear_rag.tasks import DotProduct, Interface, LinearTasks, Projection
from linear_rag.training import train_layer

RATE = 0.05
close = dict(rtol=1e-9, atol=1e-9)


@dataclass
class Problem:
    """Examples, starting weights and queries, in float64."""

    w1: Tensor
    w2: Tensor
    x1: Tensor
    x2: Tensor
    y: Tensor
    q1: Tensor
    q2: Tensor


def descend(problem: Problem, steps: int, rate: float = RATE) -> tuple[Tensor, Tensor]:
    """W1 and W2 after gradient descent on eq. 3, written out and differentiated by autograd."""
    w1, w2 = problem.w1.clone(), problem.w2.clone()
    for _ in range(steps):
        w1, w2 = w1.requires_grad_(), w2.requires_grad_()
        residuals = w1 @ problem.x1.T + w2 @ problem.x2.T - problem.y.T
        g1, g2 = torch.autograd.grad((residuals**2).sum() / (2 * len(problem.y)), (w1, w2))
        w1, w2 = (w1 - rate * g1).detach(), (w2 - rate * g2).detach()
    return w1, w2


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def random_problem(seed: int, n: int, inputs: int, outputs: int, documents: int, width: int) -> Problem:
    """Of both interfaces: their W2 is an independent matrix, whatever it was made from."""
    g, found = Generator().manual_seed(seed), documents * width
    shapes = [(outputs, inputs), (outputs, found), (n, inputs), (n, found), (n, outputs), (3, inputs), (3, found)]
    return Problem(*(normal(g, *shape) for shape in shapes))


sizes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "n": st.integers(1, 12),
        "inputs": st.integers(1, 7),
        "outputs": st.integers(1, 4),
        "documents": st.integers(1, 6),
        "width": st.integers(1, 5),
    }
)


@given(sizes=sizes)
def test_loss_and_gradient_step(sizes: dict[str, int]) -> None:
    """Eq. 3 one example at a time; eq. 4 against autograd."""
    p = random_problem(**sizes)
    residuals = [p.w1 @ a + p.w2 @ b - y for a, b, y in zip(p.x1, p.x2, p.y, strict=True)]
    expected = sum(float((r * r).sum()) for r in residuals) / (2 * len(residuals))
    assert float(rag_loss(p.w1, p.w2, p.x1, p.x2, p.y)) == pytest.approx(expected, rel=1e-12)
    delta_1, delta_2 = gradient_step(p.w1, p.w2, p.x1, p.x2, p.y, RATE)
    w1, w2 = descend(p, 1)
    torch.testing.assert_close(delta_1, w1 - p.w1, **close)
    torch.testing.assert_close(delta_2, w2 - p.w2, **close)


@given(sizes=sizes)
def test_both_interfaces(sizes: dict[str, int]) -> None:
    """The dot product's, eq. 11, document by document, with encoders for queries (W_q) and documents (W_d).

    The projection's, section 3.2: W1 x_q + W2 D with W2 = W1 W_d, that is W1 (x_q + W_d D).
    """
    g = Generator().manual_seed(sizes["seed"])
    inputs, outputs, width = sizes["inputs"], sizes["outputs"], sizes["width"]
    w_q, w_d, w1, w_z = (normal(g, *shape) for shape in [(width, inputs)] * 2 + [(outputs, inputs)] * 2)
    documents, x = normal(g, sizes["documents"], inputs), normal(g, inputs)
    expected = w1 @ x
    for d in documents:
        expected = expected + w_z @ d * ((w_q @ x) @ (w_d @ d))
    w2 = dot_product_weight(w_z, documents, w_q.T @ w_d)
    torch.testing.assert_close(predict(w1, w2, x[None], x[None])[0], expected, **close)
    w_d, found = normal(g, inputs, len(documents) * width), normal(g, len(documents) * width)
    prediction = predict(w1, projection_weight(w1, w_d), x[None], found[None])[0]
    torch.testing.assert_close(prediction, w1 @ (x + w_d @ found), **close)


@given(sizes=sizes)
def test_attention_is_the_papers_formula(sizes: dict[str, int]) -> None:
    """Eq. 2, with the injected rows under both keys and values (eq. 22), one token at a time."""
    g = Generator().manual_seed(sizes["seed"])
    d, n, k = sizes["inputs"], sizes["n"], sizes["documents"]
    w_q, w_k, w_v, p = (normal(g, d, d) for _ in range(4))
    tokens, context, injected = normal(g, 3, d), normal(g, n, d), normal(g, k, d)
    layer = LinearAttention(w_q, w_k, w_v, p)
    for rows in [None, injected]:
        keys, values = [w_k @ e for e in context], [w_v @ e for e in context]
        if rows is not None:
            keys, values = [*keys, *rows], [*values, *rows]
        columns_k, columns_v = torch.stack(keys, dim=1), torch.stack(values, dim=1)
        expected = torch.stack([p @ columns_v @ columns_k.T @ (w_q @ e) for e in tokens])
        torch.testing.assert_close(layer.attend(tokens, context, rows), expected, **close)


@given(sizes=sizes, depth=st.integers(1, 6))
def test_k_layers_are_k_gradient_steps(sizes: dict[str, int], depth: int) -> None:
    """Eq. 5 to 7: x1 and x2 of all tokens stay, y moves by dW1 x1 + dW2 x2, that of the context for the next layer."""
    p = random_problem(**sizes)
    w1, w2 = descend(p, depth)
    first = torch.stack([p.w1 @ a + p.w2 @ b for a, b in zip(p.q1, p.q2, strict=True)])  # before any step
    context, queries = torch.cat([p.x1, p.x2, p.y], dim=-1), torch.cat([p.q1, p.q2, first], dim=-1)
    layer = gradient_step_layer(p.w1, p.w2, len(p.y), RATE)
    prediction = stack(layer, context, queries, depth, outputs=p.y.shape[1])
    torch.testing.assert_close(prediction, p.q1 @ w1.T + p.q2 @ w2.T, **close)
    assert not layer.attend(queries, context)[:, : -p.y.shape[1]].any()


SMALL = {
    "projection": Projection(documents=2, inputs=3, width=2, examples=30),
    "dot product": DotProduct(2, Generator().manual_seed(0), sigma=0.3, inputs=3, examples=30),
}


def drawn(name: str, count: int = 200, seed: int = 1, alpha: float = 1.0) -> LinearTasks:
    return SMALL[name].sample(count, Generator().manual_seed(seed), alpha)


@pytest.mark.parametrize(("name", "variance"), [("projection", 1.0), ("dot product", 0.5)])
def test_targets_are_linear_in_the_tokens_features(name: str, variance: float) -> None:
    """The smallest weights that fit a task are its teacher's, or the halves of W1 + W2 where x1 = x2."""
    tasks = drawn(name)
    tokens = torch.cat([tasks.context, tasks.queries(tasks.x, tasks.target)], dim=1).double()
    features, targets = tokens[..., :-1], tokens[..., -1:]
    teacher = torch.linalg.pinv(features, rtol=1e-6) @ targets
    torch.testing.assert_close(features @ teacher, targets, atol=1e-4, rtol=0)
    assert float(teacher.square().mean()) == pytest.approx(variance, rel=0.2)


def test_injected_row_is_the_first_prediction_as_a_key() -> None:
    """Eq. 22, where h_d must have the width of x: W2, whose product with x_q is what the documents say of it."""
    tasks = drawn("dot product")
    assert tasks.injected is not None
    key = tasks.queries(tasks.x, torch.zeros(200)) @ tasks.injected.mT
    torch.testing.assert_close(key.flatten(), tasks.first_prediction(tasks.x))
    assert float(tasks.first_prediction(tasks.x).abs().mean()) > 1e-3


def as_problem(tasks: LinearTasks, i: int, inputs: int) -> Problem:
    query = tasks.queries(tasks.x, torch.zeros(len(tasks.x)))[i].double()
    context = tasks.context[i].double()
    return Problem(
        w1=torch.zeros(1, inputs, dtype=torch.float64),
        w2=tasks.w2.expand(len(tasks.x), -1, -1)[i].double(),
        x1=context[:, :inputs],
        x2=context[:, inputs:-1],
        y=context[:, -1:],
        q1=query[:, :inputs],
        q2=query[:, inputs:-1],
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("depth", [1, 3])
def test_comparison_with_twice_the_steps_of_autograd(name: str, depth: int) -> None:
    """A predictor is compared with twice itself, so every figure is known from autograd's weights."""
    tasks = drawn(name, count=40)
    step = gradient_descent(0.4, depth)
    actual = compare(lambda tasks, x: 2 * step(tasks, x), step, tasks)
    predictions, sensitivities = [], []
    for i in range(40):
        p = as_problem(tasks, i, inputs=3)
        w1, w2 = descend(p, depth, rate=0.4)
        predictions.append(w1 @ p.q1[0] + w2 @ p.q2[0])
        sensitivities.append(w1[0] + w2[0] if name == "dot product" else w1[0])
    prediction, target = torch.cat(predictions), tasks.target.double()
    assert actual.prediction_difference == pytest.approx(float(prediction.abs().mean()), rel=1e-4)
    assert actual.sensitivity_distance == pytest.approx(float(torch.stack(sensitivities).norm(dim=1).mean()), rel=1e-4)
    assert actual.sensitivity_cosine == pytest.approx(1, abs=1e-5)
    assert actual.loss == pytest.approx(float((2 * prediction - target).square().mean()), rel=1e-4)
    assert actual.reference_loss == pytest.approx(float((prediction - target).square().mean()), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "interface", [Projection(documents=2, inputs=6), DotProduct(2, Generator().manual_seed(0), inputs=6)]
)
def test_a_single_layer_trains_to_one_gradient_step(interface: Interface) -> None:
    tasks = interface.sample(2000, Generator().manual_seed(2))
    reference = gradient_descent(best_rate(tasks))
    seen: dict[int, LinearAttention] = {}
    arguments: dict[str, Any] = dict(steps=300, batch=128, seed=3, learning_rate=0.02)
    layer = train_layer(interface, watch=seen.__setitem__, every=150, **arguments)
    before, after = (compare(trained(which), reference, tasks) for which in (seen[0], layer))
    assert list(seen) == [0, 150, 300] and seen[300] is layer
    assert before.sensitivity_cosine < 0.6 and before.loss > 1.5 * before.reference_loss
    assert after.sensitivity_cosine > 0.98 and after.loss < 1.1 * after.reference_loss
    first, again = (train_layer(interface, **arguments | {"steps": 5}) for _ in range(2))
    assert torch.equal(first.value, again.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_normalizations_are_scikit_learns_and_scipys(name: str) -> None:
    """On the rows they were fitted on and on others, which may lie outside."""
    from scipy import stats
    from sklearn import preprocessing

    generator = Generator().manual_seed(0)
    rows, others = normal(generator, 50, 3).exp(), normal(generator, 20, 3).exp() * 2
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


def test_a_file_is_read_by_its_columns_names(tmp_path: Path) -> None:
    file = tmp_path / "calories.csv"
    file.write_text("id;Gender;Age;Calories\n1;male;31;40.5\n2;female;8.5;-3\n", encoding="utf-8")
    table = from_csv(file, "Calories", "Age, Gender")
    assert table.features.tolist() == [[31, 1], [8.5, 0]] and table.target.tolist() == [40.5, -3]


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


def test_sensitivities_go_through_the_mlp() -> None:
    """The chain rule, with the MLP's Jacobian by finite differences."""
    training, _ = split(stand_ins()["Friedman"], NORMALIZATIONS["z-score"], examples=5)
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
