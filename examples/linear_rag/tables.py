"""Regression data sets: the paper's, from files, and stand-ins that need none (In-Context Optimization, appendix F)."""

from __future__ import annotations

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
"""Target and features of the paper's sets, as their published files name them. Those of bikes and wine are UCI's
hour.csv and winequality-white.csv, by the paper's numbers of rows. Of bikes, casual and registered sum to cnt."""


@dataclass(frozen=True)
class Table:
    """Rows to learn from.

    Attributes:
        features: shape (n, d).
        target: what is predicted from them, shape (n,).
    """

    features: Tensor
    target: Tensor

    def skewness(self) -> float:
        """Mean over the features of the size of their skewness: 0 where symmetric, 2 for an exponential."""
        centred = self.features.double() - self.features.double().mean(dim=0)
        cubes = centred.pow(3).mean(dim=0) / centred.square().mean(dim=0).pow(1.5)
        return float(cubes.abs().mean())


def from_csv(path: str | Path, target: str, features: str) -> Table:
    """A file with a header, separated by commas or semicolons.

    A column in which some value is not a number holds names; they become 0, 1, 2 ... in alphabetical order.

    Args:
        path: the file.
        target: the name of a column.
        features: names of columns, with commas between them.

    Raises:
        ValueError: a column is not in the header, or a row has no value for it.
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
    """California Housing as scikit-learn fetches it, once, from the internet.

    Args:
        folder: where it is kept; scikit-learn's own by default.
    """
    data = fetch_california_housing(data_home=folder)
    return _table(data.data, data.target)


def stand_ins() -> dict[str, Table]:
    """Four sets for a machine without internet. None is the paper's; two are even, two are skewed.

    * "Friedman": 2,000 rows of scikit-learn's `make_friedman1`: ten uniform features, of which five matter.
    * "Friedman, skewed": the same rows and targets; each feature u has become 1 / (1 - 0.95 u)^1.5, a cut-off Pareto
      tail. Ranks are those of "Friedman".
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
