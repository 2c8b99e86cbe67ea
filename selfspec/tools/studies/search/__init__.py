"""Searches for the skip set that promises the highest speed."""

from selfspec.tools.studies.search.run import Found, SearchPlan, find, save, search

__all__ = ["Found", "SearchPlan", "find", "save", "search"]
