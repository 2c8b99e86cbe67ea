"""Draft heads: small networks over states of the target, published alone or as a part of checkpoints.

Each family has one file; `head.py` (a head), `folder.py` (its files), `layered.py` (layers over several states)
and `pairs.py` (drafting with a cache of its own) are shared.
"""
