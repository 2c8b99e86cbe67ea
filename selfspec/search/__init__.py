"""Searches for the skip set that promises the highest speed."""

from selfspec.search.plan import SearchPlan
from selfspec.search.run import Found, search

__all__ = ["Found", "SearchPlan", "search"]
