"""Regression data sets: the paper's, from files, and others that need none (In-Context Optimization, appendix F)."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import fetch_california_housing, load_breast_cancer, load_diabetes, make_friedman1
from torch import Tensor

COLUMNS: dict[str, tuple[str, str]] = {
    "California Housing": (
        "MedHouseVal",
        "MedInc, HouseAge, AveRooms, AveBedrms, Population, AveOccup, Latitude, Longitude",
    ),
    "Bike Sharing": (
        "cnt",
        "season, yr, mnth, hr, holiday, weekday, workingday, weathersit, temp, atemp, hum, windspeed, casual, "
        "registered",
    ),
    "Wine Quality": (
        "quality",
        "fixed acidity, volatile acidity, citric acid, residual sugar, chlorides, free sulfur dioxide, "
        "total sulfur dioxide, density, pH, sulphates, alcohol",
    ),
    "Calorie Expenditure": ("Calories", "Gender, Age, Height, Weight, Duration, Heart_Rate, Body_Temp"),
}
"""Target and features of the paper's sets, as named in their published files. By the paper's row counts, the bike and
wine files are UCI's hour.csv and winequality-white.csv. In the bike set, casual and registered sum to cnt."""


@dataclass(frozen=True)
class Table:
    """Rows to learn from.

    Attributes:
        features: shape (n, d).
        target: the values to predict from the features, shape (n,).
    """

    features: Tensor
    target: Tensor

    def skewness(self) -> float:
        """Return the mean absolute skewness of the features, 0 if symmetric, 2 for an exponential distribution."""
        centered = self.features.double() - self.features.double().mean(dim=0)
        cubes = centered.pow(3).mean(dim=0) / centered.square().mean(dim=0).pow(1.5)
        return float(cubes.abs().mean())


def from_csv(path: str | Path, target: str, features: str) -> Table:
    """Read a file with a header, separated by commas or semicolons.

    If a column has a value that is not a number, its values are names and become 0, 1, 2 ... in alphabetical order.

    Args:
        path: the file.
        target: the target's column name.
        features: column names, separated by a comma and a space.

    Raises:
        ValueError: a column is not in the header, or a row has no value for a column.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        file.seek(0)
        rows = list(csv.DictReader(file, delimiter=";" if ";" in header else ","))
    columns = []
    for name in [*features.split(", "), target]:
        if not rows or name not in rows[0]:
            raise ValueError(f"{path} has no column {name!r} with values; its header is: {header.strip()}")
        values = [row[name] for row in rows]
        if not all(values):
            raise ValueError(f"{path}: row {values.index(next(v for v in values if not v)) + 1} has no {name!r}")
        columns.append(_numbers(values))
    return Table(features=torch.tensor(columns[:-1]).T.contiguous(), target=torch.tensor(columns[-1]))


def california_housing(folder: str | None = None) -> Table:
    """Return California Housing, which scikit-learn downloads once into `folder` (None: scikit-learn's own folder)."""
    data = fetch_california_housing(data_home=folder)
    return _table(data.data, data.target)


def stand_ins() -> dict[str, Table]:
    """Return four sets for a machine without internet. None is from the paper; two are nearly symmetric, two skewed.

    * "Friedman": 2,000 rows of scikit-learn's `make_friedman1`: ten uniform features, of which five matter.
    * "Friedman, skewed": the same rows and targets, but each feature u becomes 1 / (1 - 0.95 u)^1.5, a truncated Pareto
      tail. Ranks are the same as in "Friedman".
    * "diabetes": scikit-learn's 442 patients, ten measurements, the disease's progress.
    * "breast cancer": scikit-learn's 569 tumours, mean area from the nine other means.
    """
    features, target = make_friedman1(2000, random_state=0)
    diabetes = load_diabetes(scaled=False)
    cancer = load_breast_cancer()
    means = cancer.data[:, :10]
    area = list(cancer.feature_names).index("mean area")
    return {
        "Friedman": _table(features, target),
        "Friedman, skewed": _table((1 - 0.95 * features) ** -1.5, target),
        "diabetes": _table(diabetes.data, diabetes.target),
        "breast cancer": _table(np.delete(means, area, axis=1), means[:, area]),
    }


def _table(features: object, target: object) -> Table:
    return Table(torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(target, dtype=torch.float32))


def _numbers(values: list[str]) -> list[float]:
    try:
        return [float(value) for value in values]
    except ValueError:
        names = sorted(set(values))
        return [float(names.index(value)) for value in values]
