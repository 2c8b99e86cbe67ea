"""Tools on top of the engine: bench, calibrate, verify, train, studies, demo."""
