"""The Triton kernels: one source for every chip, capabilities come in as constexpr."""
