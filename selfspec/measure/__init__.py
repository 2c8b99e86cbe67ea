"""Measure each thing once, for all tools: costs, acceptance, memory, time, texts, prompts, intervals."""
