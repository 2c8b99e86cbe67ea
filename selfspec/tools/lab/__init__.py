"""The lab: arms that decode, runs that record all conditions they were measured under, and one report of them."""
