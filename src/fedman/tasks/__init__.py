"""The tasks by name; the first is the default. A new one is a file in this folder and a line here."""

from __future__ import annotations

from fedman.parts import Registry
from fedman.tasks.base import Task
from fedman.tasks.classification import Classification
from fedman.tasks.language_model import LanguageModel
from fedman.tasks.multi_label import MultiLabel
from fedman.tasks.regression import Regression

TASKS = Registry(
    "task",
    Task,  # type: ignore[type-abstract]
    {
        "classification": Classification,
        "regression": Regression,
        "multi-label": MultiLabel,
        "language-model": LanguageModel,
    },
)

__all__ = ["TASKS", "Classification", "LanguageModel", "MultiLabel", "Regression", "Task"]
