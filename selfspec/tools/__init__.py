"""Tools on top of the engine: the lab (bench, ablate, search), calibrate, verify, train, export, doctor."""
