"""Draft heads: small networks over states of the target, published alone or as a part of checkpoints.

Each family has one file. They share `head.py` (the computation of a head), `pairs.py` (its passes over a cache of its
own, which follows the committed text) and `growing_head.py` (drafting with it).
"""
