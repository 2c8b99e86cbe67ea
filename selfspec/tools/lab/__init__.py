"""The lab: arms that decode, runs that say all that they were measured under, and one report of them."""
