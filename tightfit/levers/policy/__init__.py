"""What levers decide, without torch: which layers are recomputed, what goes to the host, how work is cut into pieces.

Formulas and the code that acts ask the same functions, so a prediction and a run cannot choose differently. They are
given bytes and seconds; they know no model beyond its spec, no tensor and no formula.
"""
