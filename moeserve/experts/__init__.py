"""Where expert weights are: slots, the map from logical to physical experts, load counts."""
