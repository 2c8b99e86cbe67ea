"""More model than memory: which weights stay in memory, which are streamed, and what drafts in their place."""
