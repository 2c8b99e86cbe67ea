"""Draft heads: small networks over states of the target, as they are published or lie inside checkpoints.

One file a family. What they have in common is `head.py` (what a head computes), `pairs.py` (its passes over a cache of
its own, which follows what is committed) and `growing_head.py` (drafts with it).
"""
