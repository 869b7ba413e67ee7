"""Side by side with peers: every (workload, method, size) in a process of its own."""
