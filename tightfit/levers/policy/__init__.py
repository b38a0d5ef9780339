"""Decisions of levers, without torch: which layers are recomputed, what is offloaded, how work is cut into pieces.

Memory formulas and the levers call the same functions, so a prediction and a run cannot choose differently. The
functions take bytes and seconds; they know no model beyond its spec, no tensor and no formula.
"""
