"""Everything between a file or a hub id and a parsed conversation: sources, datasets by name, mixes, prompts."""
