"""A discrete-event model of the three tiers' protocol: which load so many devices serve, and within which latency.

`scenario` says what is simulated, `stations` and `model` do it, `bound` has the formulas to hold the result against,
`calibration` reads measured times, `plan` searches the fewest devices, and `figure` draws.
"""
