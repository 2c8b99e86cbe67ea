"""Run models larger than memory: plan which weights stay and which are streamed, and make copies that draft."""
