"""A discrete-event model of the three tiers' protocol: the load that a number of devices serves, and the latency.

`scenario` defines the input and `model` runs it. `requests` pass through the `tiers` of each `replica`; every tier is
a station (`stations`). `bound` has formulas for an upper bound on the throughput, `calibration` reads measured times,
`plan` searches for the fewest devices, and `figure` draws.
"""
