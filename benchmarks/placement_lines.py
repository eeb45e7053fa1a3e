"""One acceptance line of the placement benchmarks: the figure, its limit, and EPLB's beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import report


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A figure with its limit.

    section: 'planning', 'drift', 'fanout' or 'time'. setting: data, ranks x slots. split: how an
    expert's tokens go to its copies: 'even', 'planned', 'batch', or '-' where it does not matter.
    value: ours. limit: None where the figure is only reported. at_least: the limit is from below.
    eplb: EPLB's figure of the same run, where there is one.
    """

    section: str
    what: str
    setting: str
    value: float
    split: str = "even"
    limit: float | None = None
    at_least: bool = False
    eplb: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool | None:
        """Whether the limit is kept; None without one."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def publish(lines: Sequence[Line], provenance: dict[str, Any], path: Any = None) -> None:
    """JSON lines on stdout, one table on stderr."""
    for line in lines:
        record = {"benchmark": "placement", **asdict(line), "passed": line.passed, **provenance}
        report.print_json(record, path)
    rows = [
        (
            line.section,
            line.what,
            line.setting,
            line.split,
            line.value,
            "" if line.limit is None else f"{'>=' if line.at_least else '<='} {line.limit:g}",
            "" if line.eplb is None else line.eplb,
            {None: "reported", True: "pass", False: "FAIL"}[line.passed],
        )
        for line in lines
    ]
    columns = ("section", "what", "setting", "split", "ours", "limit", "EPLB", "")
    report.print_table("placement", columns, rows)
