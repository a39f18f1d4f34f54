"""The placements that kilter ships as rehearsal files: their costs are invented."""

NAMES = ("p1", "p2", "p3", "p4", "p5", "p6")
