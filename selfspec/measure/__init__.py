"""Measure each thing once, for all tools: costs, acceptance, time, texts, prompts, intervals."""
