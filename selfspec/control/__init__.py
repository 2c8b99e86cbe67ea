"""How long to draft, and whether to draft at all: controls, costs, and profiles of a calibration."""
