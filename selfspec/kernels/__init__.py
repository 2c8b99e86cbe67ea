"""Kernels for few rows and grouped queries on a CPU, and packed weights."""
