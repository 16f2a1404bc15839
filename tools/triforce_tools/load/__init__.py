"""A benchmark of running servers: it sends them a load through the APIs of their clients, and measures the answers."""
