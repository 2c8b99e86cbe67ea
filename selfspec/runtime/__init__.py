"""Ways to run a pass: the stock modules, or a program recorded from them that computes the same without Python."""

from selfspec.runtime.runtime import Eager, Runtime, Traced

__all__ = ["Eager", "Runtime", "Traced"]
