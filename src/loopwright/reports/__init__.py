"""Reports, made from ledgers alone."""

from loopwright.reports.export import write_best, write_csv, write_parquet
from loopwright.reports.page import write_report

__all__ = [
    "write_best",
    "write_csv",
    "write_parquet",
    "write_report",
]
