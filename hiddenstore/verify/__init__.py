"""Three depths of doubt about a store: is everything there, is every byte intact, does it mean what it says."""

from hiddenstore.verify.report import DEPTHS, Depth, Finding, Report
from hiddenstore.verify.run import verify

__all__ = ["DEPTHS", "Depth", "Finding", "Report", "verify"]
