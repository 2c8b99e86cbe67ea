"""Read JSON from anywhere safely, check output places before work, and write files whole or not at all."""
