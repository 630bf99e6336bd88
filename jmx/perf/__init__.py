"""Speed: measuring a layer, the machine's own limits, tuning, and what a machine lacks."""
