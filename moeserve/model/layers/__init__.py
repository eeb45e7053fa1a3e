"""The parts of a decoder: plain classes around tensors, computing with ``moeserve_kernels``."""
