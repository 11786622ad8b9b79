"""What the tests measured, beside what they should reach; conftest.py prints it at the end."""

from dataclasses import dataclass

MEASURED = []


@dataclass(frozen=True)
class Figure:
    what: str
    value: float
    unit: str
    goal: float | None = None

    def __str__(self):
        if self.goal is None:
            return f"{self.what:<72} {self.value:8.1f} {self.unit}"
        verdict = "" if self.value <= self.goal else "   MISSED"
        return f"{self.what:<72} {self.value:8.1f} {self.unit} (goal: at most {self.goal:g}){verdict}"


def measured(what, value, unit, goal=None):
    """Note a figure. A miss fails nothing: the machine may be busy."""
    MEASURED.append(Figure(what, value, unit, goal))
