"""What one worker computes in a step: models, devices, compute time, gradient buckets, memory, jitter."""
