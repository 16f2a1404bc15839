"""Speculation: how tiers draft for one another, in one process or in several."""
