"""One generation: the loop, judging and committing, sampling, processors, stopping, and what comes out."""
