"""The work of one worker in a step: models, devices, compute time, gradient buckets, memory, jitter."""
