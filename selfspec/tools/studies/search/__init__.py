"""Searches for the skip set that promises the highest speed."""

from selfspec.tools.studies.search.plan import SearchPlan
from selfspec.tools.studies.search.run import Found, search

__all__ = ["Found", "SearchPlan", "search"]
