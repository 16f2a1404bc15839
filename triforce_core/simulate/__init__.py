"""A discrete-event model of the three tiers' protocol: which load so many devices serve, and within which latency.

`scenario` says what is simulated and `model` runs it: on the `tiers` of each `replica`, through which `requests` pass,
all of them made of `stations`. `bound` has the formulas to hold the result against, `calibration` reads measured times,
`plan` searches the fewest devices, and `figure` draws.
"""
