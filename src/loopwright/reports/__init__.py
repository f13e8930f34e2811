"""Reports, made from ledgers alone."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.reports.export import write_best, write_csv, write_parquet
    from loopwright.reports.page import write_report

__all__ = [
    "write_best",
    "write_csv",
    "write_parquet",
    "write_report",
]

__getattr__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(("write_best", "write_csv", "write_parquet"), "export"),
        "write_report": "page",
    },
)
