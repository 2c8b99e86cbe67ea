"""Compute products of few rows and of weights in few bits. This package does not depend on models."""
