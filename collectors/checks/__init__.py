"""Are captured states what they are called: checks at capture and against Hugging Face."""
