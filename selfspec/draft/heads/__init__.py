"""Draft heads: small networks over states of the target, published alone or as a part of checkpoints.

Each family has one file; `head.py` (a head), `pairs.py` (its passes) and `growing_head.py` (drafting) are shared.
"""
