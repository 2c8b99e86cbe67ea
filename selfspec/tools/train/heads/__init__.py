"""Draft heads for a base that stays as it is: what learns, and the folders of the layouts that other engines read."""
