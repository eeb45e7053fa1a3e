"""One rank's process: the step loop, the scheduler, the KV blocks, the sampler."""
