"""What a store keeps of its target: head bundle, identity, layer profile, calibration slice."""
