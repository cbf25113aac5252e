"""Target → records: conversations, tokens, engines, checks, jobs; what peers have dumped."""
