"""Ablation studies: what drafts of many kinds are worth on many models and texts, declared, resumable, reported."""
