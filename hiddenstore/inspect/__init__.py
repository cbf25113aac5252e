"""What a person sees of a store: facts, samples, differences."""
